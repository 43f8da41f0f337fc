"""Kubernetes manifests of a run: a RayJob of KubeRay, and an Indexed Job without Ray.

    ray   ConfigMap (the config) + RayJob: KubeRay starts a cluster, its head runs ``tonnage train``, then it is deleted
    job   ConfigMap + headless Service + Job: one pod for each node runs ``torchrun``; pod 0 decides, and exports

Both need a claim of a volume that all pods may write (ReadWriteMany): model, data and run lie there, and relative paths
start there. Written are the fields that the published schemas know, no more than the run needs:

* RayJob, RayCluster: ``ray.io/v1`` (https://ray-project.github.io/kuberay/reference/api)
* Job, Service, ConfigMap, Pod: ``batch/v1`` and ``v1`` (https://kubernetes.io/docs/reference/kubernetes-api)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tonnage.config import Config, LocalLaunch, RayLaunch, SlurmLaunch
from tonnage.config.read import config_text
from tonnage.errors import Problem, UserError
from tonnage.rundir.directory import RunDirectory

CONFIG_DIRECTORY = "/etc/tonnage"
GPU = "nvidia.com/gpu"
SAVE_SECONDS = 120
"""Between Kubernetes' request to end a pod and its end, for workers to save."""
PORT = 29500
HEAD_CPUS, HEAD_MEMORY = 2, "8Gi"
"""For the pod of Ray's head: it prepares data, decides, follows, and trains nothing."""
SCRIPT = """\
set -u
run={run}
if [ "$JOB_COMPLETION_INDEX" = 0 ] && [ ! -e "$run/config.yaml" ]; then
    tonnage train {config} --prepare || exit $?
fi
until [ -e "$run/config.yaml" ]; do sleep 2; done
torchrun --nnodes {nodes} --nproc-per-node {each} --node-rank "$JOB_COMPLETION_INDEX" \\
    --master-addr {name}-0.{name} --master-port {port} -m tonnage.training.worker "$run" &
child=$!
trap 'kill -TERM "$child"' TERM
wait "$child"
status=$?
trap - TERM
if [ "$status" -gt 128 ]; then wait "$child"; status=$?; fi
if [ "$status" = 0 ] && [ "$JOB_COMPLETION_INDEX" = 0 ] && [ ! -e "$run/export" ]; then
    rm -rf "$run/.export" && tonnage export "$run" "$run/.export" && mv "$run/.export" "$run/export"
    status=$?
fi
exit "$status"
"""
_NAME = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
FORMS = {
    "image": (r"[\w.:/@-]+", "registry/me/tonnage:1", 500),
    "claim": (rf"{_NAME}(\.{_NAME})*", "shared", 253),
    "mount": (r"/[^:\x00-\x1f\x7f-\x9f\u2028\u2029]*", "/shared", 4000),
    "memory": (r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?", "64Gi", 40),
    "namespace": (_NAME, "training", 63),
}
"""Of what the user says of the pods: what Kubernetes takes, an example, and how long it may be."""


@dataclass(frozen=True)
class Pods:
    """What the pods of a run are made of."""

    image: str
    """Holds Python with tonnage (and Ray, for a RayJob)."""
    claim: str
    """Of the shared volume."""
    mount: str = "/shared"
    """Where it is mounted; the working directory."""
    memory: str | None = None
    """Of a node's pod, as Kubernetes writes it."""
    namespace: str | None = None


@dataclass(frozen=True)
class PodShape:
    """A run's workers over nodes."""

    workers: int
    fewest_nodes: int
    nodes: int
    cpus_per_worker: int
    gpus_per_worker: int

    @property
    def each(self) -> int:
        """Workers of a node."""
        return -(-self.workers // self.nodes)

    @staticmethod
    def of(config: Config) -> PodShape:
        match config.launch:
            case RayLaunch() as launch:
                cpus = 1 if launch.cpus_per_worker == "auto" else launch.cpus_per_worker
                each = -(-launch.num_workers // launch.nodes)
                fewest = -(-launch.fewest_workers // each)
                return PodShape(launch.num_workers, fewest, launch.nodes, cpus, launch.num_gpus)
            case SlurmLaunch() as launch:
                gpus = int(launch.gpus_per_node > 0)
                return PodShape(launch.num_workers, launch.nodes, launch.nodes, launch.cpus_per_worker, gpus)
            case LocalLaunch() as launch:
                return PodShape(launch.num_workers, 1, 1, launch.threads if launch.threads != "auto" else 1, 0)


def check_pods(pods: Pods) -> None:
    """Refuse what Kubernetes would. Raises ``UserError``."""
    problems = []
    for name, (form, example, longest) in FORMS.items():
        said = getattr(pods, name)
        if said is not None and not (re.fullmatch(form, said, re.ASCII) and len(said) <= longest):
            shown = said if len(said) <= 80 else said[:77] + "..."
            problems.append(Problem(f"--{name} is {shown!r}", "what Kubernetes takes", f"such as {example}"))
    if problems:
        raise UserError(*problems)


def ray_job(config: Config, pods: Pods) -> list[dict[str, Any]]:
    shape, name = PodShape.of(config), name_of(config)
    of_ray = {"max_failures", "resize_seconds", "wait_seconds", "runtime_env"}
    launch = RayLaunch.model_validate(
        {
            "with": "ray",
            "address": "auto",
            "workers": shape.workers,
            "least": fewest if (fewest := config.launch.fewest_workers) < shape.workers else None,
            "nodes": shape.nodes,
            "hardware": config.launch.node_hardware,
            "cpus_per_worker": shape.cpus_per_worker,
            "gpus_per_worker": shape.gpus_per_worker,
            "threads": config.launch.threads,
            "timeout": config.launch.timeout,
            **(config.launch.model_dump(include=of_ray) if isinstance(config.launch, RayLaunch) else {}),
        }
    )
    head = _container("ray-head", pods, {"cpu": HEAD_CPUS, "memory": HEAD_MEMORY})
    worker = _container("ray-worker", pods, _resources(shape, pods))
    spec = {
        "entrypoint": f"tonnage train {CONFIG_DIRECTORY}/config.yaml",
        "shutdownAfterJobFinishes": True,
        "submissionMode": "K8sJobMode",
        "rayClusterSpec": {
            "headGroupSpec": {
                "rayStartParams": {"num-cpus": "0", "num-gpus": "0"},
                "template": {"spec": _pod_spec(head, name, pods)},
            },
            "workerGroupSpecs": [
                {
                    "groupName": "workers",
                    "replicas": shape.nodes,
                    "minReplicas": shape.fewest_nodes,
                    "maxReplicas": shape.nodes,
                    "rayStartParams": {},
                    "template": {"spec": _pod_spec(worker, name, pods)},
                }
            ],
        },
    }
    return [
        _config_map(config.model_copy(update={"launch": launch}), name, pods),
        {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": _metadata(name, pods), "spec": spec},
    ]


def indexed_job(config: Config, pods: Pods) -> list[dict[str, Any]]:
    """A ConfigMap, a headless Service by which pods find pod 0, and an Indexed Job."""
    shape, name = PodShape.of(config), name_of(config)
    launch = LocalLaunch.model_validate(
        {"with": "local", "workers": shape.workers, "timeout": config.launch.timeout, "threads": config.launch.threads}
    )
    script = SCRIPT.format(
        run=RunDirectory(config.output).word,
        config=f"{CONFIG_DIRECTORY}/config.yaml",
        nodes=shape.nodes,
        each=shape.each,
        name=name,
        port=PORT,
    )
    container = _container("worker", pods, _resources(shape, pods)) | {
        "command": ["/bin/bash", "-c", unexpanded(script)]
    }
    labels = {"tonnage-run": name}
    pod = _pod_spec(container, name, pods) | {
        "subdomain": name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": SAVE_SECONDS,
    }
    return [
        _config_map(config.model_copy(update={"launch": launch}), name, pods),
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": _metadata(name, pods),
            "spec": {"clusterIP": "None", "selector": labels, "publishNotReadyAddresses": True},
        },
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": _metadata(name, pods),
            "spec": {
                "completionMode": "Indexed",
                "completions": shape.nodes,
                "parallelism": shape.nodes,
                "backoffLimit": 3 * shape.nodes,
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
    ]


def unexpanded(text: str) -> str:
    """A text of ``command`` or ``args`` from which Kubernetes makes ``text``.

    It puts variables of the container in the place of ``$(NAME)`` and one dollar in that of two; it also takes the byte
    after a dollar for a letter, and so breaks letters of several bytes.
    (https://github.com/kubernetes/kubernetes/blob/master/third_party/forked/golang/expansion/expand.go)
    """
    return re.sub(r"\$(?=[$(]|[^\x00-\x7f])", "$$", text)


def name_of(config: Config) -> str:
    """A name for Kubernetes: from the run's, in small letters, digits and dashes, short enough for what is added."""
    name = re.sub(r"[^a-z0-9]+", "-", config.output.rstrip("/").rpartition("/")[2].lower()).strip("-")
    return f"run-{name}"[:40].rstrip("-")


def _metadata(name: str, pods: Pods) -> dict[str, Any]:
    return {"name": name} | ({"namespace": pods.namespace} if pods.namespace else {})


def _config_map(config: Config, name: str, pods: Pods) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(name, pods),
        "data": {"config.yaml": config_text(config)},
    }


def _resources(shape: PodShape, pods: Pods) -> dict[str, Any]:
    """Of one node's pod."""
    resources: dict[str, Any] = {"cpu": shape.each * shape.cpus_per_worker}
    if shape.gpus_per_worker:
        resources[GPU] = shape.each * shape.gpus_per_worker
    return resources | ({"memory": pods.memory} if pods.memory else {})


def _container(name: str, pods: Pods, resources: Mapping[str, Any]) -> dict[str, Any]:
    quantities = {key: str(value) for key, value in resources.items()}
    return {
        "name": name,
        "image": pods.image,
        "workingDir": pods.mount,
        "resources": {"requests": quantities, "limits": quantities},
        "volumeMounts": [
            {"name": "shared", "mountPath": pods.mount},
            {"name": "config", "mountPath": CONFIG_DIRECTORY},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def _pod_spec(container: Mapping[str, Any], name: str, pods: Pods) -> dict[str, Any]:
    return {
        "containers": [dict(container)],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": pods.claim}},
            {"name": "config", "configMap": {"name": name}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
