"""The manifests for Kubernetes: what a cluster would refuse, and that they and the package agree."""

from typing import Any

import pytest
from manifests import container, documents, environment, jobs, of_kind

from lightning_recycle import ConfigurationError
from lightning_recycle.control.client import EXIT_LEFT, EXIT_LOST_COORDINATOR, EXIT_RAISED, EXIT_STOPPED
from lightning_recycle.control.coordinator.standalone import _parser
from lightning_recycle.control.network.addresses_and_keys import address_from, check_key
from lightning_recycle.engines.worker_environment import discover, port_range

FIELDS = {"spec.nodeName": "node-7", "status.podIP": "10.1.2.3"}
KEY = "a secret of 16 bytes or more"
NAME = "jobset.sigs.k8s.io/jobset-name"
JOB = "jobset.sigs.k8s.io/replicatedjob-name"

PROBES = {"startupProbe": "/readyz", "readinessProbe": "/readyz", "livenessProbe": "/healthz"}
JOBSET = {  # of jobset.x-k8s.io/v1alpha2, as far as the manifest uses it
    "successPolicy": {"operator", "targetReplicatedJobs"},
    "failurePolicy": {"maxRestarts", "rules", "restartStrategy"},
    "replicatedJobs": {"name", "groupName", "replicas", "template", "dependsOn"},
}


def test_the_objects_are_what_kubernetes_takes():
    schemas: Any = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for one in documents():
        if one["kind"] != "JobSet":
            schemas.validate(one, schemas.latest_version(), strict=True)
    for name, spec in jobs().items():
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}
        schemas.validate(job, schemas.latest_version(), strict=True)


def test_the_jobset_has_fields_that_jobsets_have():
    (jobset,) = of_kind("JobSet")
    assert jobset["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert jobset["spec"].keys() <= JOBSET.keys()
    for name, fields in JOBSET.items():
        for part in jobset["spec"][name] if name == "replicatedJobs" else [jobset["spec"][name]]:
            assert part.keys() <= fields
    assert set(jobset["spec"]["successPolicy"]["targetReplicatedJobs"]) <= jobs().keys()
    for spec in jobs().values():
        assert spec["template"]["spec"]["restartPolicy"] == "Never"  # a podFailurePolicy needs it


def test_whoever_is_selected_exists():
    labels: list[dict[str, str]] = [one["spec"]["selector"] for one in of_kind("Service")]
    labels += [one["spec"]["selector"]["matchLabels"] for one in of_kind("PodDisruptionBudget")]
    for policy in of_kind("NetworkPolicy"):
        labels.append(policy["spec"]["podSelector"]["matchLabels"])
        for rule in policy["spec"]["ingress"]:
            labels += [peer["podSelector"]["matchLabels"] for peer in rule["from"]]
    assert labels
    (spot,) = of_kind("Job")
    further = spot["spec"]["template"]["metadata"]["labels"]
    assert further in labels
    for wanted in [label for label in labels if label != further]:
        assert wanted[NAME] == of_kind("JobSet")[0]["metadata"]["name"]
        assert wanted.get(JOB, "workers") in jobs()


def test_a_worker_finds_its_run_in_the_environment_of_its_container():
    found = discover({**environment("workers", FIELDS, KEY), "RECYCLE_HOST": "127.0.0.1"})  # it must be its own
    (service,) = of_kind("Service")
    assert found.coordinator == (service["metadata"]["name"], service["spec"]["ports"][0]["port"])
    assert (found.node, found.host, found.device) == ("node-7", "127.0.0.1", 0)
    assert environment("workers", FIELDS, KEY)["RECYCLE_HOST"] == "10.1.2.3"
    assert found.key == KEY.encode()


def test_the_coordinator_listens_where_the_others_look():
    program, *options = container("coordinator")["command"]
    assert program == "recycle-coordinator"
    host, port = address_from(_parser().parse_args(options).listen, "--listen")
    assert host == "0.0.0.0"
    (service,) = of_kind("Service")
    assert port == service["spec"]["ports"][0]["port"] == container("coordinator")["ports"][0]["containerPort"]


def test_the_probes_ask_for_pages_that_the_coordinator_has_where_it_has_them():
    _, *options = container("coordinator")["command"]
    ports = {port["name"]: port["containerPort"] for port in container("coordinator")["ports"]}
    asked = {name: container("coordinator")[name]["httpGet"] for name in PROBES}
    assert {name: get["path"] for name, get in asked.items()} == PROBES
    http = address_from(_parser().parse_args(options).http, "--http")
    for get in asked.values():
        assert http == ("0.0.0.0", ports[get["port"]])


def test_the_network_policy_lets_pass_what_is_needed_and_no_more():
    def allowed(name: str) -> set[tuple[int, int]]:
        (policy,) = (one for one in of_kind("NetworkPolicy") if one["metadata"]["name"] == name)
        return {(rule["port"], rule.get("endPort", rule["port"])) for rule in policy["spec"]["ingress"][0]["ports"]}

    ports = port_range(environment("workers", FIELDS, KEY))
    of_workers = {(ports[0], ports[-1])}
    assert allowed("recycle") == allowed("recycle-from-spot") == {(29400, 29400)} | of_workers
    assert allowed("recycle-spot") == of_workers


def test_the_exit_statuses_are_those_of_the_package():
    def values(job: str, action: str) -> set[int]:
        rules = jobs()[job]["podFailurePolicy"]["rules"]
        codes = [rule["onExitCodes"] for rule in rules if rule["action"] == action and "onExitCodes" in rule]
        assert all(code["containerName"] == container(job)["name"] for code in codes)
        return {value for code in codes for value in code["values"]}

    assert values("workers", "Ignore") == {EXIT_LOST_COORDINATOR, EXIT_LEFT}
    assert values("workers", "FailJob") == {EXIT_RAISED, EXIT_STOPPED}
    assert values("coordinator", "FailJob") == {1, 2}


def test_a_disruption_costs_one_worker_at_a_time_and_there_is_time_to_leave():
    workers = jobs()["workers"]
    assert workers["parallelism"] == workers["completions"]
    (least,) = (
        one["spec"]["minAvailable"]
        for one in of_kind("PodDisruptionBudget")
        if one["spec"]["selector"]["matchLabels"][JOB] == "workers"
    )
    assert least == 8 - 1  # of 8 workers; the ninth is a spare
    assert workers["template"]["spec"]["terminationGracePeriodSeconds"] >= 60


def test_workers_on_spot_nodes_are_those_of_the_jobset_and_their_number_changes():
    (spot,) = of_kind("Job")
    spec = spot["spec"]
    usual, further = jobs()["workers"], spec["template"]["spec"]
    assert further["containers"] == usual["template"]["spec"]["containers"]
    assert spec["podFailurePolicy"] == usual["podFailurePolicy"]
    assert "completions" not in spec  # a Job with completions does not run more pods than are left to complete


def test_the_key_of_the_example_is_refused():
    (secret,) = of_kind("Secret")
    with pytest.raises(ConfigurationError):
        check_key(secret["stringData"]["key"].encode(), "RECYCLE_KEY")
