"""The chart: it lints, renders valid manifests, asks for no right too many, names typing errors."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from helm_python import Chart, HelmError, lint

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "trainmount"

NAMESPACED = {"ServiceAccount", "Role", "RoleBinding", "Deployment", "DaemonSet"}


def render(values: dict[str, Any] | None = None, name: str = "trainmount") -> dict[str, str]:
    with Chart.load(str(CHART)) as chart:
        rendered: dict[str, str] = chart.render(values or {}, name=name, namespace="tm-system")
        return rendered


def documents(values: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    return [
        document
        for path, text in render(values).items()
        if path.endswith(".yaml")
        for document in yaml.safe_load_all(text)
        if document
    ]


def one(kind: str, values: dict[str, Any] | None = None, suffix: str = "") -> dict[str, Any]:
    found = [
        d for d in documents(values) if d["kind"] == kind and d["metadata"]["name"].endswith(suffix)
    ]
    assert len(found) == 1, [d["metadata"]["name"] for d in found]
    return found[0]


def test_the_chart_lints_without_a_warning() -> None:
    result = lint(str(CHART), strict=True)
    messages = result["messages"] if isinstance(result, dict) else result.messages
    assert [m for m in messages if "icon is recommended" not in str(m)] == []


VARIANTS: list[dict[str, Any]] = [
    {},
    {"operator": {"enabled": False}},
    {"driver": {"enabled": False}, "rbac": {"aggregate": False}},
    {"operator": {"namespaces": ["team-a", "team-b"], "verbose": True}},
    {"image": {"digest": "sha256:" + "0" * 64, "pullSecrets": ["registry"]}},
    {
        "driver": {
            "mountPods": {"resources": {"requests": {"cpu": "1"}, "limits": {"memory": "2Gi"}}}
        }
    },
    {"global": {"x": 1}},
]


@pytest.mark.parametrize("values", VARIANTS, ids=json.dumps)
def test_every_variant_renders_named_objects_in_the_release_namespace(
    values: dict[str, Any],
) -> None:
    seen = set()
    for document in documents(values):
        metadata = document["metadata"]
        assert document["apiVersion"] and document["kind"]
        identity = (document["kind"], metadata.get("namespace"), metadata["name"])
        assert identity not in seen
        seen.add(identity)
        if document["kind"] in NAMESPACED:
            assert metadata["namespace"] in ("tm-system", "team-a", "team-b")
        assert metadata["labels"]["app.kubernetes.io/name"] == "trainmount"


def test_the_chart_installs_the_crd_of_the_manifests_and_keeps_it() -> None:
    crd = one("CustomResourceDefinition")
    assert crd["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert crd == yaml.safe_load((ROOT / "manifests" / "crd.yaml").read_text())
    kinds = [d["kind"] for d in documents({"crd": {"install": False}})]
    assert "CustomResourceDefinition" not in kinds


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({"operatr": {}}, "operatr"),
        ({"operator": {"defaultImge": "x"}}, "defaultImge"),
        ({"driver": {"mountPods": {"resource": {}}}}, "resource"),
        ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"operator": {"startDeadlineSeconds": -1}}, "startDeadlineSeconds"),
        ({"image": {"digest": "sha256:0"}}, "digest"),
    ],
)
def test_a_mistyped_value_is_refused_with_its_path(values: dict[str, Any], path: str) -> None:
    with pytest.raises(HelmError, match=path):
        render(values)


def test_the_defaults_satisfy_their_own_schema_and_every_value_is_in_it() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.validate(values, schema)

    def compare(part: dict[str, Any], value: dict[str, Any], path: str) -> None:
        known = part.get("properties", {})
        for key, inner in value.items():
            assert key in known, f"{path}.{key}"
            if isinstance(inner, dict) and "properties" in known[key]:
                compare(known[key], inner, f"{path}.{key}")

    compare(schema, values, "")


def test_the_operator_runs_without_privileges() -> None:
    pod = one("Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "volumes" not in pod


def test_the_operators_arguments_are_those_its_program_takes() -> None:
    from trainmount_operator.main import _parser

    arguments = one("Deployment", {"operator": {"namespaces": ["a"], "verbose": True}})["spec"][
        "template"
    ]["spec"]["containers"][0]["args"]
    options = _parser().parse_args(arguments)
    assert options.default_image == "localhost/trainmount-runtime:0.1.0"
    assert (options.node_lost_after, options.start_deadline) == (20, 300)
    assert options.namespace == ["a"]


def test_the_drivers_arguments_are_those_its_program_takes() -> None:
    from trainmount_csi.main import _parser

    values = {"driver": {"mountPods": {"resources": {"requests": {"cpu": "1"}}}}}
    container = one("DaemonSet", values)["spec"]["template"]["spec"]["containers"][0]
    options = _parser().parse_args(container["args"])
    assert options.image == container["image"] == "localhost/trainmount:0.1.0"
    assert options.mount_pod_cpu_request == "1"
    assert options.endpoint == ("unix:///var/lib/kubelet/plugins/csi.trainmount.dev/csi.sock")


def rules(document: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for rule in document["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                for verb in rule["verbs"]:
                    yield group, resource, verb


def test_no_role_has_a_wildcard_or_reads_secrets() -> None:
    for document in documents():
        if document["kind"] in ("Role", "ClusterRole"):
            for group, resource, verb in rules(document):
                assert "*" not in (group, resource, verb)
                assert resource != "secrets"


# The requests of trainmount_operator/cluster.py and the watches of handlers.py, by caller.
USED_BY_THE_OPERATOR = {
    ("trainmount.dev", "trainingjobs", "get"),  # reconcile
    ("trainmount.dev", "trainingjobs", "list"),  # handlers
    ("trainmount.dev", "trainingjobs", "watch"),  # handlers
    ("trainmount.dev", "trainingjobs", "delete"),  # apply: time to live
    ("trainmount.dev", "trainingjobs/status", "patch"),  # reconcile
    ("trainmount.dev", "trainingjobs/finalizers", "update"),  # blockOwnerDeletion of children
    ("batch", "jobs", "create"),  # apply
    ("batch", "jobs", "get"),  # apply: who has the name
    ("batch", "jobs", "list"),  # observe, handlers
    ("batch", "jobs", "watch"),  # handlers
    ("batch", "jobs", "patch"),  # apply: suspend
    ("batch", "jobs", "delete"),  # apply
    ("", "pods", "list"),  # observe, handlers
    ("", "pods", "watch"),  # handlers
    ("", "pods", "patch"),  # apply: end
    ("", "pods", "delete"),  # apply
    ("", "services", "create"),
    ("", "services", "get"),
    ("", "services", "delete"),
    ("", "services", "deletecollection"),
    ("", "configmaps", "create"),
    ("", "configmaps", "get"),
    ("", "configmaps", "delete"),
    ("", "configmaps", "deletecollection"),
    ("", "events", "create"),  # apply: publish
    ("", "events", "list"),  # observe: warnings
    ("", "nodes", "get"),  # observe: nodes in trouble
}


def test_the_operator_has_exactly_the_rights_it_uses() -> None:
    assert set(rules(one("ClusterRole", suffix="-operator"))) == USED_BY_THE_OPERATOR


def test_an_operator_of_some_namespaces_has_rights_in_those_only() -> None:
    values = {"operator": {"namespaces": ["team-a"]}}
    assert set(rules(one("ClusterRole", values, "-operator"))) == {("", "nodes", "get")}
    role = one("Role", values, "-operator")
    assert role["metadata"]["namespace"] == "team-a"
    assert set(rules(role)) == USED_BY_THE_OPERATOR - {("", "nodes", "get")}


def test_the_driver_touches_pods_of_its_own_namespace_only() -> None:
    role = one("Role", suffix="-driver")
    assert role["metadata"]["namespace"] == "tm-system"
    assert {resource for _, resource, _ in rules(role)} == {"pods"}
    subjects = {
        document["subjects"][0]["name"]
        for document in documents()
        if document["kind"] == "ClusterRoleBinding"
    }
    assert subjects == {"trainmount-operator"}


def test_the_driver_does_not_select_mount_pods() -> None:
    selector = one("DaemonSet")["spec"]["selector"]["matchLabels"]
    assert selector["app.kubernetes.io/component"] == "driver"


def test_the_driver_sees_the_kubelets_folder_once() -> None:
    pod = one("DaemonSet")["spec"]["template"]["spec"]
    paths = [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]]
    below = [p for p in paths if p.startswith("/var/lib/kubelet")]
    assert below == ["/var/lib/kubelet"]


def test_a_pod_is_ready_when_its_program_answers() -> None:
    (operator,) = one("Deployment")["spec"]["template"]["spec"]["containers"]
    probe = operator["readinessProbe"]["httpGet"]
    (port,) = [p["containerPort"] for p in operator["ports"] if p["name"] == probe["port"]]
    assert f"--liveness=http://0.0.0.0:{port}{probe['path']}" in operator["args"]
    values = {"driver": {"kubeletDir": "/data/kubelet"}}
    (driver,) = one("DaemonSet", values)["spec"]["template"]["spec"]["containers"]
    (endpoint,) = [a for a in driver["args"] if a.startswith("--endpoint=unix://")]
    assert driver["readinessProbe"]["exec"]["command"] == ["test", "-S", endpoint[18:]]


def test_every_value_is_used_by_a_template() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    text = "".join(path.read_text() for path in (CHART / "templates").iterdir())

    def leaves(value: object, path: str) -> Iterator[str]:
        if isinstance(value, dict) and value and path.count(".") < 3:
            for key, inner in value.items():
                yield from leaves(inner, f"{path}.{key}")
        else:
            yield path

    for path in leaves(values, ".Values"):
        parts = path.split(".")
        candidates = [".".join(parts[:end]) for end in range(4, len(parts) + 1)] or [path]
        assert any(re.search(re.escape(c) + r"\b", text) for c in candidates), path


def test_the_notes_name_the_namespace_and_what_stays() -> None:
    notes = next(text for path, text in render().items() if path.endswith("NOTES.txt"))
    assert "tm-system" in notes
    assert "kubectl delete crd trainingjobs.trainmount.dev" in notes


def test_the_chart_installs_as_a_dependency_of_another(tmp_path: Path) -> None:
    import shutil

    parent = tmp_path / "parent"
    (parent / "charts").mkdir(parents=True)
    shutil.copytree(CHART, parent / "charts" / "trainmount")
    (parent / "Chart.yaml").write_text(
        "apiVersion: v2\nname: parent\nversion: 1.0.0\n"
        "dependencies: [{name: trainmount, version: 0.1.0, condition: trainmount.enabled}]\n"
    )
    values = {"global": {"x": 1}, "trainmount": {"enabled": True}}
    with Chart.load(str(parent)) as chart:
        rendered = chart.render(copy.deepcopy(values), name="p", namespace="n")
    assert any("operator-deployment" in path for path in rendered)
