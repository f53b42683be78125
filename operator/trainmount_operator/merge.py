"""Strategic merge of a user's pod overrides into the pod that the operator builds.

Called by `children`. As in Kubernetes' own strategic merge: mappings merge key by key, a list whose
entries have an identity merges entry by entry, any other list is replaced, and null removes a
field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["strategic_merge"]

# The field that identifies an entry, for each list of a pod that has one.
_MERGE_KEYS: Final = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
}
# Lists whose entries only add up.
_APPENDED: Final = frozenset({"tolerations"})


def strategic_merge(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """A new mapping: `base` with `override` on top. Neither argument is changed."""
    result = dict(base)
    for name, value in override.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, dict) and isinstance(result.get(name), dict):
            result[name] = strategic_merge(result[name], value)
        elif isinstance(value, list) and isinstance(result.get(name), list):
            result[name] = _merged_list(name, result[name], value)
        else:
            result[name] = value
    return result


def _merged_list(name: str, base: list[Any], override: list[Any]) -> list[Any]:
    if name in _APPENDED:
        return [*base, *override]
    key = _MERGE_KEYS.get(name)
    if key is None:
        return override
    result = list(base)
    for entry in override:
        identity = entry.get(key) if isinstance(entry, dict) else None
        position = next(
            (i for i, other in enumerate(result) if identity and other.get(key) == identity), None
        )
        if position is None:
            result.append(entry)
        else:
            result[position] = strategic_merge(result[position], entry)
    return result
