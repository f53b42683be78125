"""`python -m trainmount_operator`: the operator's process. Started by the chart's Deployment, or by
hand.

By hand it uses the current context of the kubeconfig; in a pod its ServiceAccount. Everything it
knows is in the jobs' status, so it may be killed at any time; one process for a cluster (or for a
set of namespaces) is enough.

Exit codes: 0 after SIGTERM or SIGINT, 1 where the cluster cannot be reached or lacks the CRD, 2 for
wrong arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final

from kubernetes.config import ConfigException

from trainmount_files.wording import OneLineParser, printable
from trainmount_operator.children import AttemptOptions
from trainmount_operator.cluster import Cluster, ClusterError, connect
from trainmount_operator.plan import Policy
from trainmount_operator.reconcile import Reconciler
from trainmount_operator.spec import API_VERSION, PLURAL

__all__ = ["main"]

logger = logging.getLogger(__name__)

DEFAULT_IMAGE: Final = "localhost/trainmount-runtime:0.1.0"
EXIT_CLUSTER: Final = 1

_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_IMAGE: Final = re.compile(r"[^\s-]\S*")
_LIVENESS: Final = re.compile(r"http://[^/:\s]+:[0-9]{1,5}/\S*")

# Fields that every log record has; the others are what the caller passed as `extra`.
_PLAIN_FIELDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class _JsonFormatter(logging.Formatter):
    """One JSON object a line: the constant message and its fields."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {k: v for k, v in vars(record).items() if k not in _PLAIN_FIELDS}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def main(arguments: Sequence[str] | None = None) -> int:
    """Watch and reconcile until SIGTERM or SIGINT; the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    _check(parser, options)
    _configure_logging(verbose=options.verbose)
    try:
        cluster = connect()
        cluster.check_kind(API_VERSION, PLURAL)
    except ConfigException as error:
        message = printable(f"no cluster: {error}; set KUBECONFIG to a file that names one")
        print(f"trainmount-operator: {message}", file=sys.stderr)
        return EXIT_CLUSTER
    except ClusterError as error:
        print(f"trainmount-operator: {printable(str(error))}", file=sys.stderr)
        return EXIT_CLUSTER
    return asyncio.run(_serve(cluster, options))


async def _serve(cluster: Cluster, options: argparse.Namespace) -> int:
    # kopf needs its own event loop's modules only here: the parser answers --help without them.
    from trainmount_operator import handlers

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    reconciler = Reconciler(
        cluster=cluster,
        policy=Policy(
            node_lost_after=timedelta(seconds=options.node_lost_after),
            start_deadline=timedelta(seconds=options.start_deadline),
            retry_backoff=timedelta(seconds=options.retry_backoff),
        ),
        options=AttemptOptions(
            default_image=options.default_image,
            rendezvous_timeout_seconds=options.rendezvous_timeout,
        ),
    )
    logger.info("Operator starts", extra={"namespaces": options.namespace or "all"})
    await handlers.run(
        reconciler,
        namespaces=tuple(options.namespace),
        stop=stop,
        liveness=options.liveness or None,
    )
    logger.info("Operator ends")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="trainmount-operator",
        description="Runs TrainingJobs. Every option can be set by its environment variable too.",
    )
    parser.add_argument(
        "--namespace",
        action="append",
        default=[name for name in _environment("NAMESPACES", "").split(",") if name],
        help="watch this namespace only; may be given several times (TRAINMOUNT_NAMESPACES=a,b)",
    )
    parser.add_argument(
        "--default-image",
        default=_environment("DEFAULT_IMAGE", DEFAULT_IMAGE),
        help="image of jobs that name none (TRAINMOUNT_DEFAULT_IMAGE, %(default)s)",
    )
    seconds = (
        ("node-lost-after", 20, "a node that is not ready for longer is given up"),
        ("start-deadline", 300, "a job held up longer by image, configuration or volume fails"),
        ("retry-backoff", 5, "before the first retry; doubled for each further one"),
        ("rendezvous-timeout", 300, "a node waits this long for the name of node 0"),
    )
    for name, default, text in seconds:
        variable = f"{name.replace('-', '_').upper()}_SECONDS"
        parser.add_argument(
            f"--{name}",
            type=partial(_seconds, variable=f"TRAINMOUNT_{variable}"),
            metavar="SECONDS",
            default=_environment(variable, str(default)),
            help=f"{text} (TRAINMOUNT_{variable}, {default})",
        )
    parser.add_argument(
        "--liveness",
        default=_environment("LIVENESS", ""),
        help="answer probes at this URL, such as http://0.0.0.0:8080/healthz (TRAINMOUNT_LIVENESS)",
    )
    parser.add_argument("--verbose", action="store_true", help="log what is normal too")
    return parser


def _environment(name: str, default: str) -> str:
    return os.environ.get(f"TRAINMOUNT_{name}") or default


def _seconds(text: str, variable: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else -1
    if value < 0 or value > 86400:
        origin = f" from {variable}" if os.environ.get(variable) == text else ""
        raise argparse.ArgumentTypeError(
            f"must be seconds between 0 and 86400, got {text!r}{origin}"
        )
    return value


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """What comes from an argument or a variable alike: else nothing is watched or run, unseen."""
    for name in options.namespace:
        if _LABEL.fullmatch(name) is None:
            parser.error(f"--namespace (TRAINMOUNT_NAMESPACES) {name!r} is not a namespace's name")
    if _IMAGE.fullmatch(options.default_image) is None:
        parser.error(
            f"--default-image (TRAINMOUNT_DEFAULT_IMAGE) {options.default_image!r} is not an "
            "image's name"
        )
    if options.liveness and _LIVENESS.fullmatch(options.liveness) is None:
        parser.error(
            f"--liveness (TRAINMOUNT_LIVENESS) {options.liveness!r} is not the URL of a port here; "
            "write http://0.0.0.0:8080/healthz"
        )


def _configure_logging(*, verbose: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter())
    logging.basicConfig(level=logging.DEBUG if verbose else logging.INFO, handlers=[handler])
    # kopf tells of every event it passes on, and asyncio of its selector.
    for name in ("kopf", "kopf.objects", "asyncio", "urllib3"):
        logging.getLogger(name).setLevel(
            logging.INFO if name != "kopf.objects" else logging.WARNING
        )
