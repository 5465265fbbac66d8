"""The Kubernetes manifests: valid by another tool, the same at every run, and what they must say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import jsonschema
import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner, Result

from trtspec.cli import LazyGroup
from trtspec.cli.deploy_k8s import k8s
from trtspec.deploy.hosts import PRODUCTS
from trtspec.spec.gpus import GPUS
from trtspec.spec.load import load_spec
from trtspec.triton import compose, launch

HERE = Path(__file__).parent
VERSIONS = ("1.29", "1.30", "1.31", "1.32", "1.33", "1.37")
TWO_HOSTS = {
    "target": ", tensor_parallel: 8, pipeline_parallel: 2",
    "hardware": "{gpu: H100-SXM, num_gpus: 8, num_nodes: 2}",
}
SpecFile = Callable[..., Path]


class _Commands(LazyGroup):
    """Errors as the whole command line shows them."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return k8s

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        return "k8s", k8s, args[1:]


def deploy(config: Path, out: Path, *options: str) -> Result:
    return CliRunner().invoke(_Commands(), ["k8s", str(config), "--out", str(out), *options])


def written(config: Path, *options: str) -> dict[str, str]:
    """Files that one run writes, by name."""
    out = config.with_suffix("")
    result = deploy(config, out, *options)
    assert result.exit_code == 0, result.output
    return {path.relative_to(out).as_posix(): path.read_text() for path in out.rglob("*") if path.is_file()}


def documents(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]


def objects(files: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Kind/name -> object, kustomizations aside."""
    found = [each for name, text in files.items() if "kustomization" not in name for each in documents(text)]
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in found}


def pod_specs(content: Any) -> Iterator[dict[str, Any]]:
    """Every pod specification inside an object."""
    if isinstance(content, dict):
        if "containers" in content:
            yield content
        for value in content.values():
            yield from pod_specs(value)


@pytest.fixture(params=["one host", "two hosts", "LLM API", "sizes unknown", "orchestrator"])
def files(request: pytest.FixtureRequest, spec_file: SpecFile) -> dict[str, str]:
    """The manifests of several kinds of specs."""
    sections: dict[str, dict[str, Any]] = {
        "one host": {},
        "two hosts": TWO_HOSTS,
        "LLM API": {
            "engine": '{runtime: tensorrt_llm, track: llmapi, version: "1.3.0"}',
            "hardware": "{gpu: H200, num_gpus: 2}",
            "target": ", tensor_parallel: 2",
            "serving": "{image: registry.example.org/tritonserver:27.01}",
        },
        "sizes unknown": {"known": False},
        "orchestrator": {
            **TWO_HOSTS,
            "speculation": "{method: draft_target, draft: {model: models/target}}",
            "serving": "{orchestrator: true, spawn_processes: false}",
        },
    }
    options = ["--namespace", "llm", "--storage-class", "shared", "--storage-size", "500Gi", "--replicas", "3"]
    return written(spec_file(**sections[request.param]), *(options if request.param == "two hosts" else []))


def test_another_tool_finds_them_valid(files: dict[str, str]) -> None:
    for name, each in objects(files).items():
        if each["kind"] in ("LeaderWorkerSet", "PodMonitor"):
            schema = json.loads((HERE / f"{each['kind'].lower()}.json").read_text())
            jsonschema.validate(each, schema)
            templates = each["spec"].get("leaderWorkerTemplate", {})
            pods = [templates[key] for key in ("leaderTemplate", "workerTemplate") if key in templates]
            checked = [{"apiVersion": "v1", "kind": "PodTemplate", "metadata": {}, "template": pod} for pod in pods]
        else:
            checked = [each]
        for version in VERSIONS:
            for content in checked:
                assert kubernetes_validate.validate(content, version, strict=True) == version, name


def test_kustomize_finds_one_file_a_kind(files: dict[str, str]) -> None:
    for directory in ("", "build/"):
        kustomization = documents(files[f"{directory}kustomization.yaml"])[0]
        assert kustomization["apiVersion"] == "kustomize.config.k8s.io/v1beta1"
        beside = {name for name in files if name.startswith(directory) and "/" not in name.removeprefix(directory)}
        assert {f"{directory}{name}" for name in kustomization["resources"]} == {
            *beside - {f"{directory}kustomization.yaml"}
        }
        kinds = [{each["kind"].lower() for each in documents(files[name])} for name in sorted(beside)]
        assert all(len(kind) == 1 for kind in kinds)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("directory", ["", "build/"])
def test_kustomize_builds_them_and_an_overlay(files: dict[str, str], directory: str, tmp_path: Path) -> None:
    base, overlay = tmp_path / "base", tmp_path / "overlay"
    for name, text in files.items():
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text(text)
    overlay.mkdir()
    (overlay / "kustomization.yaml").write_text(
        f"resources: [../base/{directory}]\nlabels: [{{pairs: {{team: search}}}}]\nnamePrefix: blue-\n"
    )

    def build(where: Path) -> dict[str, dict[str, Any]]:
        command = ["kubectl", "kustomize", str(where)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert run.returncode == 0, run.stderr
        return objects({"built": run.stdout})

    here = {
        name: text for name, text in files.items() if name.startswith(directory) and ("/" in name) == bool(directory)
    }
    assert build(base / directory) == objects(here)
    changed = build(overlay)
    assert len(changed) == len(objects(here))
    assert all(each["metadata"]["labels"]["team"] == "search" for each in changed.values())
    assert all(name.split("/")[1].startswith("blue-") for name in changed)


def test_nobody_is_root_and_nothing_can_be_written_but_scratch(files: dict[str, str]) -> None:
    pods = [pod for each in objects(files).values() for pod in pod_specs(each)]
    assert pods
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] == 1000
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            named = {volume["name"] for volume in pod["volumes"]}
            assert {mount["name"] for mount in container["volumeMounts"]} == named
            if container["name"] != "build":
                writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
                assert writable == {"/dev/shm", "/tmp"}


def test_what_they_refer_to_is_there(files: dict[str, str]) -> None:
    found = objects(files)
    for each in found.values():
        for pod in pod_specs(each):
            for volume in pod["volumes"]:
                if "configMap" in volume:
                    assert f"ConfigMap/{volume['configMap']['name']}" in found
                if "persistentVolumeClaim" in volume:
                    assert f"PersistentVolumeClaim/{volume['persistentVolumeClaim']['claimName']}" in found
    server = found.get("Deployment/llama") or found["LeaderWorkerSet/llama"]
    container = next(pod_specs(server))["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {port["targetPort"] for port in found["Service/llama"]["spec"]["ports"]} == {*ports}
    assert found["PodMonitor/llama"]["spec"]["podMetricsEndpoints"][0]["port"] in ports
    labels = {
        "Deployment": lambda: server["spec"]["template"]["metadata"]["labels"],
        "LeaderWorkerSet": lambda: (
            server["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["metadata"]["labels"]
            | {"leaderworkerset.sigs.k8s.io/worker-index": "0"}
        ),  # set by the controller
    }[server["kind"]]()
    for selector in (
        found["Service/llama"]["spec"]["selector"],
        found["PodMonitor/llama"]["spec"]["selector"]["matchLabels"],
        found["PodDisruptionBudget/llama"]["spec"]["selector"]["matchLabels"],
        found["NetworkPolicy/llama-server"]["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    if scaler := found.get("HorizontalPodAutoscaler/llama"):
        target = scaler["spec"]["scaleTargetRef"]
        assert (target["kind"], target["apiVersion"]) == (server["kind"], server["apiVersion"])
        assert "replicas" not in server["spec"]


def test_every_run_writes_the_same(spec_file: SpecFile) -> None:
    config = spec_file()
    assert written(config) == written(config)


def test_the_server_is_started_as_docker_compose_starts_it(spec_file: SpecFile) -> None:
    found = objects(written(spec_file()))
    container = next(pod_specs(found["Deployment/llama"]))["containers"][0]
    service = yaml.safe_load(compose.FILE.read_text())["services"][compose.SERVICE]
    assert {each["name"]: each["value"] for each in container["env"]} == service["environment"]
    assert container["command"][:2] == service["command"].split()[:2]
    options = launch.options_parser().parse_args(container["command"][2:])
    assert options.timeout == 300 and options.ranks == 1
    words = launch.server_command(options, "secret", ["tensorrt_llm"])
    assert {f"--{name}-address=0.0.0.0" for name in ("http", "grpc", "metrics")} < {*words}
    assert any(word.startswith("--http-restricted-api=model-repository,") for word in words)
    texts = found["ConfigMap/llama-scripts"]["data"]
    assert texts["launch.py"] == Path(launch.__file__).read_text() and {*texts} == {"launch.py", "probe.py"}


def test_probes_send_a_request(files: dict[str, str]) -> None:
    server = objects(files).get("Deployment/llama") or objects(files)["LeaderWorkerSet/llama"]
    container = next(pod_specs(server))["containers"][0]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container[name]
        words = probe["exec"]["command"]
        assert words[:2] == ["python3", "/opt/trtspec/probe.py"]
        assert ("--llmapi" in words) == ("--llmapi" in container["command"])
        assert ("--or-busy" in words) == (name != "startupProbe")
        waits = float(words[words.index("--timeout") + 1]) + 2 * 5  # and two looks at the target's counts
        assert probe["timeoutSeconds"] > waits
    startup = container["startupProbe"]
    assert startup["failureThreshold"] * startup["periodSeconds"] > 300


def test_gpus_memory_and_shared_memory_come_from_the_spec(spec_file: SpecFile) -> None:
    serving = "{shm_size: 16GiB}"
    config = spec_file(target=", tensor_parallel: 4", hardware="{gpu: A100-40GB, num_gpus: 4}", serving=serving)
    pod = next(pod_specs(objects(written(config))["Deployment/llama"]))
    terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    products = ["NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-PCIE-40GB"]
    assert terms == [{"matchExpressions": [{"key": "nvidia.com/gpu.product", "operator": "In", "values": products}]}]
    limits = pod["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == 4
    # 8.03e9 weights of 2 bytes, 17.2 GB of shared memory, 8 GB of processes
    assert limits["memory"] == "42G"
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(16 * 2**30)}} in pod["volumes"]


def test_every_gpu_of_the_catalogue_has_a_label() -> None:
    assert {*PRODUCTS} == {*GPUS} - {"cpu"}


def test_builds_read_the_same_spec_on_the_volume(spec_file: SpecFile, tmp_path: Path) -> None:
    config = spec_file(target=", dtype: float16")
    files = written(config)
    there = tmp_path / "cluster.yaml"
    there.write_text(objects(files)["ConfigMap/llama-spec"]["data"]["spec.yaml"])
    spec, own = load_spec(there), load_spec(config)
    assert spec.name == own.name and spec.engine == own.engine and spec.serving == own.serving
    assert (
        spec.target.model == "/data/inputs/target" and "models/target -> /data/inputs/target" in files["build/job.yaml"]
    )
    assert (str(spec.engines_dir), str(spec.model_repo_dir)) == ("/data/engines", "/data/model_repo")
    server = next(pod_specs(objects(files)["Deployment/llama"]))["containers"][0]
    paths = {mount.get("subPath"): mount["mountPath"] for mount in server["volumeMounts"]}
    assert paths["engines"] == own.serving.mount_point and paths["model_repo"] == "/models"


def test_builds_need_gpus_only_to_compile(spec_file: SpecFile) -> None:
    found = objects(written(spec_file()))
    prepare, engines = found["Job/llama-prepare"], found["Job/llama-engines"]
    assert "nvidia.com/gpu" not in next(pod_specs(prepare))["containers"][0]["resources"]["limits"]
    assert next(pod_specs(prepare))["containers"][0]["args"][-1] == "--no-compile"
    assert next(pod_specs(engines))["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert engines["spec"]["suspend"] is True and "suspend" not in prepare["spec"]


def test_several_hosts_get_their_ranks(spec_file: SpecFile) -> None:
    files = written(spec_file(**TWO_HOSTS))
    server = objects(files)["LeaderWorkerSet/llama"]["spec"]["leaderWorkerTemplate"]
    leader, worker = (server[key]["spec"]["containers"][0] for key in ("leaderTemplate", "workerTemplate"))
    assert server["size"] == 2 and worker["command"] == ["python3", "/opt/trtspec/ranks.py", "work"]
    words = leader["command"]
    assert words[words.index("--slots") + 1] == "8,8" and words[words.index("--ranks") + 1] == "16"
    assert leader["resources"] == worker["resources"] and leader["resources"]["limits"]["nvidia.com/gpu"] == 8
    for container in (leader, worker):
        assert container["env"][-1]["valueFrom"] == {"secretKeyRef": {"name": "llama-ranks", "key": "key"}}
    assert "Deployment/llama" not in objects(files)


def test_an_orchestrator_stands_beside_the_ranks_of_the_first_host(spec_file: SpecFile) -> None:
    speculation = "{method: draft_target, draft: {model: models/target}}"
    serving = "{orchestrator: true, spawn_processes: false}"
    found = objects(written(spec_file(**TWO_HOSTS, speculation=speculation, serving=serving)))
    words = next(pod_specs(found["LeaderWorkerSet/llama"]))["containers"][0]["command"]
    assert words[words.index("--slots") + 1] == "10,8", "itself, the draft, and eight of the target"


def test_no_secret_is_written(files: dict[str, str]) -> None:
    assert not any(name.startswith("Secret/") for name in objects(files))


def test_commands_in_comments_name_the_namespace(spec_file: SpecFile) -> None:
    text = "".join(written(spec_file(**TWO_HOSTS), "--namespace", "llm").values())
    commands = re.findall(r"kubectl (?!apply -k|get )(.*)", text)
    assert len(commands) > 5 and all(command.startswith("-n llm ") for command in commands)
    assert {
        each["metadata"].get("namespace") for each in objects(written(spec_file(), "--namespace", "llm")).values()
    } == {"llm"}


def test_the_network_is_closed_but_for_what_is_named(spec_file: SpecFile) -> None:
    found = objects(written(spec_file()))
    server, build = (found[f"NetworkPolicy/llama-{part}"]["spec"] for part in ("server", "build"))
    for policy in (server, build):
        assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert [port["port"] for rule in server["ingress"] for port in rule["ports"]] == ["http", "grpc", "metrics"]
    assert [port["port"] for rule in server["egress"] for port in rule["ports"]] == [53, 53]
    assert build["ingress"] == []
    assert [port["port"] for rule in build["egress"] for port in rule["ports"]] == [53, 53, 443]


def test_replicas(spec_file: SpecFile) -> None:
    scaled = objects(written(spec_file(serving="{max_concurrency: 16}"), "--replicas", "2:6"))
    scaler = scaled["HorizontalPodAutoscaler/llama"]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 6)
    pods = scaler["metrics"][0]["pods"]
    assert pods["metric"]["name"] == "trtspec_requests_in_flight" and pods["target"]["averageValue"] == "12"
    fixed = objects(written(spec_file(serving="{max_concurrency: 16}"), "--replicas", "3"))
    assert fixed["Deployment/llama"]["spec"]["replicas"] == 3 and "HorizontalPodAutoscaler/llama" not in fixed


def test_a_dry_run_writes_nothing(spec_file: SpecFile, tmp_path: Path) -> None:
    config, out = spec_file(), tmp_path / "out"
    result = deploy(config, out, "--dry-run")
    assert result.exit_code == 0 and not out.exists()
    kinds = [each["kind"] for each in documents(result.stdout)]
    assert kinds.count("Job") == 2 and "Deployment" in kinds and kinds.count("Kustomization") == 2


@pytest.mark.parametrize(
    ("sections", "options", "message"),
    [
        ({"hardware": "{gpu: cpu}", "engine": "{runtime: torch}"}, [], "hardware.gpu: a cluster serves engines of "),
        (
            {"name": "Llama-3.1"},
            [],
            "'Llama-3.1' is no name for Kubernetes; expected a letter, .*--set name=llama-3-1$",
        ),
        ({}, ["--namespace", "My_Team"], "--namespace: 'My_Team' is no namespace .* write --namespace my-team$"),
        (
            {"hardware": "{gpu: H100-SXM, num_gpus: 8, num_nodes: 2}", "target": ", tensor_parallel: 8"},
            [],
            "hardware.num_nodes: the target is split over 8 GPUs, which one host of 8 has; expected .* = 16 on 2 hosts",
        ),
        (
            {
                **TWO_HOSTS,
                "speculation": "{method: draft_target, draft: {model: models/target, tensor_parallel: 8, "
                "pipeline_parallel: 2}}",
                "serving": "{orchestrator: true, spawn_processes: false}",
            },
            [],
            "serving.gpu_device_ids: the ranks would lie on the hosts 0, .*; change serving.gpu_device_ids",
        ),
    ],
    ids=["cpu", "name", "namespace", "one host is enough", "order of ranks"],
)
def test_refusals(
    spec_file: SpecFile, tmp_path: Path, sections: dict[str, str], options: list[str], message: str
) -> None:
    result = deploy(spec_file(**sections), tmp_path / "out", *options)
    assert result.exit_code == 1 and result.stdout == ""
    assert re.search(message, result.stderr)
    assert len(result.stderr.splitlines()) == 1 and not (tmp_path / "out").exists()


def test_other_files_are_left_alone(spec_file: SpecFile, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    for options in ([], ["--dry-run"]):
        result = deploy(spec_file(), out, *options)
        assert result.exit_code == 1 and "holds files that this command has not written: notes.txt" in result.stderr
    assert [path.name for path in tmp_path.glob("*out*")] == ["out"] and [*out.iterdir()] == [out / "notes.txt"]
    result = deploy(spec_file(), out / "notes.txt")
    assert result.exit_code == 1 and "is a file" in result.stderr


def test_what_an_earlier_run_wrote_too_much_goes(spec_file: SpecFile) -> None:
    config = spec_file()
    assert "horizontalpodautoscaler.yaml" in written(config)
    assert "horizontalpodautoscaler.yaml" not in written(config, "--replicas", "1")


@pytest.mark.parametrize("value", ["0", "3:1", "two", "1:2:3"])
def test_replicas_that_are_none(spec_file: SpecFile, tmp_path: Path, value: str) -> None:
    result = deploy(spec_file(), tmp_path / "out", "--replicas", value)
    assert result.exit_code == 2 and repr(value) in result.stderr


def test_sizes_that_are_none(spec_file: SpecFile, tmp_path: Path) -> None:
    result = deploy(spec_file(), tmp_path / "out", "--storage-size", "much")
    assert result.exit_code == 2 and "'much' is no size" in result.stderr
