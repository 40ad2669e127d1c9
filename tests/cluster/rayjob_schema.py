"""Prunes a custom resource definition to what a manifest uses: `python tests/cluster/rayjob_schema.py CRD MANIFEST OUT`.

The definition of a RayJob is a megabyte, nearly all of it a pod's. This keeps a JSON schema with, for each object in the
manifest, the names and types of all its fields, those that are required, and the values of enumerations: enough to
find a field that is misspelled, in the wrong place or of the wrong type.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

_KEPT = ("type", "enum", "minimum", "maximum", "anyOf", "x-kubernetes-int-or-string")


def pruned(schema: dict[str, Any], value: Any) -> dict[str, Any]:
    """Returns the part of the schema that this value uses."""
    kept = {name: schema[name] for name in _KEPT if name in schema and name != "anyOf"}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    if isinstance(value, dict) and "properties" in schema:
        fields = schema["properties"]
        kept["additionalProperties"] = False
        kept["required"] = schema.get("required", [])
        kept["properties"] = {name: pruned(inner, value.get(name)) for name, inner in sorted(fields.items())}
    elif isinstance(value, dict) and isinstance(schema.get("additionalProperties"), dict):
        kept["additionalProperties"] = pruned(schema["additionalProperties"], None)
    elif isinstance(value, list) and isinstance(schema.get("items"), dict):
        kept["items"] = pruned(schema["items"], _merged(value))
    return kept


def _merged(values: list[Any]) -> Any:
    """Merges the members of a list into one value."""
    found: Any = None
    for value in values:
        if isinstance(found, dict) and isinstance(value, dict):
            found = {name: _merged([one[name] for one in (found, value) if name in one]) for name in {**found, **value}}
        elif isinstance(found, list) and isinstance(value, list):
            found = [*found, *value]
        else:
            found = value
    return found


def spec_schema(definition: dict[str, Any], version: str) -> dict[str, Any]:
    """Returns the schema of `spec` in a version of a custom resource's definition."""
    (found,) = [one for one in definition["spec"]["versions"] if one["name"] == version]
    schema: dict[str, Any] = found["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return schema


if __name__ == "__main__":
    crd, manifest, out = map(Path, sys.argv[1:])
    job = yaml.safe_load(manifest.read_text(encoding="utf-8"))
    schema = pruned(
        spec_schema(yaml.safe_load(crd.read_text(encoding="utf-8")), job["apiVersion"].rpartition("/")[2]), job["spec"]
    )
    out.write_text(json.dumps(schema, separators=(",", ":"), sort_keys=True) + "\n", encoding="utf-8")
