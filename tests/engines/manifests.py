"""The manifests of examples/kubernetes, and what their containers get."""

from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"


def documents() -> list[dict[str, Any]]:
    """All objects, in the order of their files."""
    return [one for path in sorted(FOLDER.glob("*.yaml")) for one in yaml.safe_load_all(path.read_text())]


def of_kind(kind: str) -> list[dict[str, Any]]:
    """The objects of a kind."""
    return [one for one in documents() if one["kind"] == kind]


def jobs() -> dict[str, dict[str, Any]]:
    """The Jobs that the JobSet makes: name -> spec."""
    (jobset,) = of_kind("JobSet")
    return {job["name"]: job["template"]["spec"] for job in jobset["spec"]["replicatedJobs"]}


def container(job: str) -> dict[str, Any]:
    """The one container of a Job's pods."""
    (found,) = jobs()[job]["template"]["spec"]["containers"]
    return dict(found)


def environment(job: str, fields: dict[str, str], key: str) -> dict[str, str]:
    """The variables of a container of ``job``, in a pod with these fields by path and this key in its Secret."""
    found = {}
    for variable in container(job)["env"]:
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            found[variable["name"]] = fields[source["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in source:
            assert source["secretKeyRef"] == {"name": "recycle", "key": "key"}
            found[variable["name"]] = key
        else:
            found[variable["name"]] = variable["value"]
    return found
