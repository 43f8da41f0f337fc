"""The manifests hold the fields that the published schemas require and allow, no others, and what the run needs.

The field lists are those of https://ray-project.github.io/kuberay/reference/api (ray.io/v1) and of
https://kubernetes.io/docs/reference/generated/kubernetes-api (v1, batch/v1), as far as our manifests go: ``*`` marks
what is required; ``{}`` is a mapping of names to texts, a text the kind of a plain value, ``[x]`` a list.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from entry import refusal, tonnage
from hostile.strings import CANARY, LINES, SHELL, inside, recorded, recorder, shellcheck
from tonnage.config import Config, LocalLaunch, RayLaunch, read_config
from tonnage.errors import UserError
from tonnage.launch import kube

QUANTITIES: dict[str, Any] = {}
RESOURCES = {"limits": QUANTITIES, "requests": QUANTITIES, "claims": "any"}
CONTAINER = {
    "name*": "text",
    "image": "text",
    "imagePullPolicy": "text",
    "command": ["text"],
    "args": ["text"],
    "workingDir": "text",
    "env": "any",
    "envFrom": "any",
    "ports": "any",
    "lifecycle": "any",
    "livenessProbe": "any",
    "readinessProbe": "any",
    "startupProbe": "any",
    "resources": RESOURCES,
    "resizePolicy": "any",
    "restartPolicy": "text",
    "securityContext": "any",
    "stdin": "bool",
    "stdinOnce": "bool",
    "terminationMessagePath": "text",
    "terminationMessagePolicy": "text",
    "tty": "bool",
    "volumeDevices": "any",
    "volumeMounts": [
        {
            "name*": "text",
            "mountPath*": "text",
            "mountPropagation": "text",
            "readOnly": "bool",
            "recursiveReadOnly": "text",
            "subPath": "text",
            "subPathExpr": "text",
        }
    ],
}
VOLUME = {
    "name*": "text",
    "persistentVolumeClaim": {"claimName*": "text", "readOnly": "bool"},
    "configMap": {"name": "text", "items": "any", "defaultMode": "number", "optional": "bool"},
    "emptyDir": {"medium": "text", "sizeLimit": "text"},
}
POD = {
    "containers*": [CONTAINER],
    "initContainers": [CONTAINER],
    "volumes": [VOLUME],
    "restartPolicy": "text",
    "terminationGracePeriodSeconds": "number",
    "activeDeadlineSeconds": "number",
    "hostname": "text",
    "subdomain": "text",
    "nodeSelector": {},
    "serviceAccountName": "text",
    "tolerations": "any",
    "affinity": "any",
    "priorityClassName": "text",
    "imagePullSecrets": "any",
    "securityContext": "any",
    "schedulerName": "text",
    "hostNetwork": "bool",
    "dnsPolicy": "text",
    "shareProcessNamespace": "bool",
}
METADATA = {"name": "text", "namespace": "text", "labels": {}, "annotations": {}}
TEMPLATE = {"metadata": METADATA, "spec": POD}
CONFIG_MAP = {
    "apiVersion*": "text",
    "kind*": "text",
    "metadata*": METADATA,
    "data": {},
    "binaryData": {},
    "immutable": "bool",
}
SERVICE = {
    "apiVersion*": "text",
    "kind*": "text",
    "metadata*": METADATA,
    "spec*": {
        "clusterIP": "text",
        "selector": {},
        "publishNotReadyAddresses": "bool",
        "ports": "any",
        "type": "text",
    },
}
JOB = {
    "apiVersion*": "text",
    "kind*": "text",
    "metadata*": METADATA,
    "spec*": {
        "template*": TEMPLATE,
        "completionMode": "text",
        "completions": "number",
        "parallelism": "number",
        "backoffLimit": "number",
        "backoffLimitPerIndex": "number",
        "maxFailedIndexes": "number",
        "activeDeadlineSeconds": "number",
        "ttlSecondsAfterFinished": "number",
        "suspend": "bool",
        "selector": "any",
        "manualSelector": "bool",
        "podFailurePolicy": "any",
        "podReplacementPolicy": "text",
        "successPolicy": "any",
        "managedBy": "text",
    },
}
WORKER_GROUP = {
    "groupName*": "text",
    "replicas": "number",
    "minReplicas*": "number",
    "maxReplicas*": "number",
    "numOfHosts": "number",
    "idleTimeoutSeconds": "number",
    "suspend": "bool",
    "rayStartParams*": {},
    "template*": TEMPLATE,
    "scaleStrategy": "any",
}
RAY_CLUSTER = {
    "headGroupSpec*": {
        "rayStartParams*": {},
        "template*": TEMPLATE,
        "headService": "any",
        "enableIngress": "bool",
        "serviceType": "text",
    },
    "workerGroupSpecs": [WORKER_GROUP],
    "rayVersion": "text",
    "enableInTreeAutoscaling": "bool",
    "autoscalerOptions": "any",
    "headServiceAnnotations": {},
    "gcsFaultToleranceOptions": "any",
    "managedBy": "text",
    "suspend": "bool",
}
RAY_JOB = {
    "apiVersion*": "text",
    "kind*": "text",
    "metadata*": METADATA,
    "spec*": {
        "entrypoint": "text",
        "rayClusterSpec": RAY_CLUSTER,
        "clusterSelector": {},
        "metadata": {},
        "runtimeEnvYAML": "text",
        "jobId": "text",
        "submissionMode": "text",
        "submitterPodTemplate": TEMPLATE,
        "submitterConfig": "any",
        "entrypointResources": "text",
        "entrypointNumCpus": "number",
        "entrypointNumGpus": "number",
        "activeDeadlineSeconds": "number",
        "backoffLimit": "number",
        "shutdownAfterJobFinishes": "bool",
        "ttlSecondsAfterFinished": "number",
        "suspend": "bool",
        "managedBy": "text",
        "deletionStrategy": "any",
    },
}
SCHEMAS = {"ConfigMap": CONFIG_MAP, "Service": SERVICE, "Job": JOB, "RayJob": RAY_JOB}
PLAIN = {"text": str, "number": int, "bool": bool}


def faults(value: Any, schema: Any, where: str) -> list[str]:
    """What of a value its schema does not allow."""
    match schema:
        case "any":
            return []
        case str():
            return [] if type(value) is PLAIN[schema] else [f"{where} is {value!r}, no {schema}"]
        case list():
            return [fault for i, item in enumerate(value) for fault in faults(item, schema[0], f"{where}[{i}]")]
        case {}:
            if not schema:
                return [f"{where}.{key}" for key, item in value.items() if not isinstance(item, str)]
    known = {key.rstrip("*"): inner for key, inner in schema.items()}
    found = [f"{where}.{key} is no field" for key in value if key not in known]
    found += [f"{where} lacks {key}" for key in schema if key.endswith("*") and key[:-1] not in value]
    return found + [
        f for key, item in value.items() if key in known for f in faults(item, known[key], f"{where}.{key}")
    ]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "model": "models/llama",
                "data": {"train": "rows.jsonl"},
                "output": "runs/Llama_2 test",
                "launch": {
                    "with": "ray", "workers": [8, 16], "nodes": 2, "address": "auto", "hardware": "8xH100",
                    "gpus_per_worker": 1, "cpus_per_worker": 8, "max_failures": 5,
                },
            }
        )
    )  # fmt: skip
    return path


def manifests(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {path.stem.rpartition("-")[2]: list(yaml.safe_load_all(path.read_text())) for path in folder.glob("*.yaml")}


@pytest.fixture
def written(config: Path, tmp_path: Path) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path / "kube"
    words = ["--image", "registry/tonnage:1", "--claim", "shared", "--memory", "900Gi", "--to", str(folder)]
    assert tonnage("launch", "kube", str(config), *words).status in (0, None)
    return manifests(folder)


def test_every_field_is_known_and_none_is_missing(written: dict[str, list[dict[str, Any]]]) -> None:
    assert [[document["kind"] for document in written[kind]] for kind in ("rayjob", "job")] == [
        ["ConfigMap", "RayJob"],
        ["ConfigMap", "Service", "Job"],
    ]
    for document in written["rayjob"] + written["job"]:
        assert faults(document, SCHEMAS[document["kind"]], document["kind"]) == []
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", document["metadata"]["name"])
    assert [written["rayjob"][1]["apiVersion"], written["job"][2]["apiVersion"]] == ["ray.io/v1", "batch/v1"]


def test_the_schemas_here_find_faults(written: dict[str, list[dict[str, Any]]]) -> None:
    job = written["rayjob"][1]
    job["spec"]["entrypoints"] = "x"
    del job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["groupName"]
    job["spec"]["shutdownAfterJobFinishes"] = "yes"
    assert len(faults(job, RAY_JOB, "RayJob")) == 3


def config_in(documents: list[dict[str, Any]], tmp_path: Path) -> Config:
    path = tmp_path / "unpacked.yaml"
    path.write_text(documents[0]["data"]["config.yaml"])
    return read_config(path, [], check_files=False)


def test_the_config_goes_with_it(written: dict[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    found = config_in(written["rayjob"], tmp_path).launch
    assert isinstance(found, RayLaunch)
    assert (found.fewest_workers, found.workers, found.max_failures) == (8, 16, 5)
    assert (found.address, found.hardware) == ("auto", "8xH100")
    local = config_in(written["job"], tmp_path)
    assert isinstance(local.launch, LocalLaunch)
    assert local.launch.workers == 16


def test_pods_have_what_their_workers_need(written: dict[str, list[dict[str, Any]]]) -> None:
    cluster = written["rayjob"][1]["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (1, 2, 2)
    pod = written["job"][2]["spec"]["template"]["spec"]
    for container in (group["template"]["spec"]["containers"][0], pod["containers"][0]):
        assert container["resources"]["limits"] == {"cpu": "64", "nvidia.com/gpu": "8", "memory": "900Gi"}
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"  # no worker beside the one who decides


def test_the_script_of_the_job_is_one(written: dict[str, list[dict[str, Any]]]) -> None:
    service, job = written["job"][1:]
    pod = job["spec"]["template"]["spec"]
    script = pod["containers"][0]["command"][2]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    name = job["metadata"]["name"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert f"--master-addr {name}-0.{name} " in script
    assert "--nnodes 2 --nproc-per-node 8" in script
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()


def test_what_cannot_be_known_is_asked_for(config: Path) -> None:
    assert re.search(r"(?s)no --image.*no --claim", refusal("launch", "kube", str(config)))
    assert kube.name_of(read_config(config, [], check_files=False)) == "run-llama-2-test"


def as_kubernetes_expands(text: str, variables: dict[str, str]) -> str:
    """What becomes of a word of ``command``: Kubernetes' own ``expansion.Expand``, byte by byte as it is there."""
    given, found, at = text.encode(), b"", 0
    while at < len(given):
        if given[at : at + 1] != b"$" or at + 1 == len(given):
            found, at = found + given[at : at + 1], at + 1
        elif given[at + 1 : at + 2] == b"$":
            found, at = found + b"$", at + 2
        elif given[at + 1 : at + 2] == b"(":
            end = given.find(b")", at)
            name = given[at + 2 : end].decode(errors="replace")
            if end < 0:
                found, at = found + b"$(", at + 2
            else:
                found, at = found + variables.get(name, f"$({name})").encode(), end + 1
        else:
            found, at = found + b"$" + chr(given[at + 1]).encode(), at + 2
    return found.decode()


def config_with(output: str) -> Config:
    keys = {"model": "models/llama", "data": {"train": "rows.jsonl"}, "launch": {"workers": 1}, "output": output}
    return Config.model_validate(keys)


PODS = kube.Pods("registry/tonnage:1", "shared")
NAMES = st.one_of(
    st.sampled_from([*SHELL, *LINES]), st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1)
)


@settings(max_examples=40, deadline=None)
@given(NAMES.filter(lambda name: name not in (".", "..") and name[0] != "~" and len(name.encode()) < 150))
def test_any_output_arrives_at_the_programs_and_nothing_else_runs(output: str) -> None:
    (pod,) = kube.indexed_job(config_with(output), PODS)[2]["spec"]["template"]["spec"]["containers"]
    written = yaml.safe_load(yaml.safe_dump(pod["command"]))
    variables = {"JOB_COMPLETION_INDEX": "0", "HOME": "/root"}
    command = [as_kubernetes_expands(word, variables) for word in written]
    with TemporaryDirectory() as folder:
        here, stubs = Path(folder) / "here", Path(folder) / "stubs"
        run = here / output
        run.mkdir(parents=True)
        (run / "config.yaml").touch()
        recorder(stubs / "torchrun")
        recorder(stubs / "tonnage", 'mkdir -p "${@: -1}"')
        environment = os.environ | variables | {"PATH": f"{stubs}:{os.environ['PATH']}"}
        with inside(here):
            subprocess.run(command, env=environment, check=True, capture_output=True)
        assert Path(recorded(stubs / "torchrun")[-1]) == Path(output)
        assert recorded(stubs / "tonnage")[0] == "export"
        assert [Path(word) for word in recorded(stubs / "tonnage")[1:]] == [Path(output), Path(output) / ".export"]
        assert not recorded(stubs / "tonnage")[1].startswith("-")
        assert (run / "export").is_dir()
        assert list(here.iterdir()) == [run]
        assert not list(Path(folder).rglob(CANARY))


@given(st.text(st.sampled_from("$()a {é€"), max_size=12))
def test_kubernetes_leaves_a_text_as_it_is(text: str) -> None:
    assert as_kubernetes_expands(kube.unexpanded(text), {"a": "expanded"}) == text


def test_the_expansion_here_is_kubernetes() -> None:
    """Cases of its own ``expand_test.go``."""
    variables = {"VAR_A": "A", "VAR_EMPTY": ""}
    for text, expanded in (
        ("$(VAR_A)", "A"), ("___$(VAR_A)___", "___A___"), ("$$(VAR_A)_$(VAR_A)", "$(VAR_A)_A"), ("$$$(VAR_A)", "$A"),
        ("$$$$(VAR_A)", "$$(VAR_A)"), ("foo$(VAR_EMPTY)bar", "foobar"), ("$VAR_A", "$VAR_A"),
        ("$(NO_VAR)", "$(NO_VAR)"), ("$(VAR_A", "$(VAR_A"), ("$(VAR_A)$", "A$"),
    ):  # fmt: skip
        assert as_kubernetes_expands(text, variables) == expanded


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("image", ["a b", "", "a;b", "$(x)", "a\nb", "a" * 600]),
        ("claim", ["Shared", "a b", "-a", "a/b", "a\u2028", "a" * 300]),
        ("mount", ["shared", "/a:b", "/a\nb", ""]),
        ("memory", ["64GB", "lots", "-1Gi", "1 Gi"]),
        ("namespace", ["Mine", "a.b", "a b", "a" * 64]),
    ],
)
def test_what_kubernetes_would_not_take_is_refused(option: str, values: list[str]) -> None:
    for value in values:
        with pytest.raises(UserError, match=f"--{option} is "):
            kube.check_pods(kube.Pods(**{"image": "i", "claim": "c", option: value}))


def test_what_kubernetes_takes() -> None:
    kube.check_pods(kube.Pods("host:5000/me/tonnage:1.2@sha256:0a", "my.claim-1", "/mnt/my data", "1.5Ti", "a-1"))
    for memory in ("64Gi", "900M", "1e9", "128974848", None):
        kube.check_pods(kube.Pods("i", "c", memory=memory))


def test_shellcheck_has_no_complaint() -> None:
    for name in SHELL:
        (pod,) = kube.indexed_job(config_with(name), PODS)[2]["spec"]["template"]["spec"]["containers"]
        assert shellcheck("#!/bin/bash\n" + as_kubernetes_expands(pod["command"][2], {})) == "", name


def test_manifests_that_cannot_be_written_leave_nothing_behind(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["launch", "kube", str(config), "--image", "i", "--claim", "c", "--to"]
    (tmp_path / "file").touch()
    for to in ("file", "file/below"):
        assert "the manifests could not be written" in refusal(*words, str(tmp_path / to))
    replace, replaced = Path.replace, 0

    def second_is_refused(path: Path, target: Path) -> Path:
        nonlocal replaced
        replaced += 1
        if replaced == 2:
            raise OSError(28, os.strerror(28))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", second_is_refused)
    said = refusal(*words, str(tmp_path / "kube"))
    assert re.search(r"the manifests could not be written: No space left on device \(.* are free\)", said)
    assert replaced == 2
    assert not (tmp_path / "kube").exists()
