"""The steps of a build, from a spec: resolve, pair, plan, the runtime's stages for each model, engines, repository,
manifest.

Knows which step needs what, and whom to call for it; the work is done elsewhere.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from trtspec.build import limits, manifest
from trtspec.build.fingerprint import digest
from trtspec.build.graph import Graph, Results, Step, Task
from trtspec.build.runtimes import LLM_API, EngineJob, Stage, stages
from trtspec.build.sources import Sources
from trtspec.decoding.methods import METHODS
from trtspec.errors import TrtspecError
from trtspec.models.config import ModelConfig
from trtspec.spec.rules import role_key
from trtspec.spec.schema import Mtp, Spec
from trtspec.trtllm import llmapi
from trtspec.trtllm.host import look

# Settings of the running server that the model repository does not contain.
_LAUNCH_ONLY = {"host", "http_port", "grpc_port", "metrics_port", "startup_timeout_s", "num_threads"}
_LAUNCH_ONLY |= {"image", "shm_size", "probe_interval_s"}
# Settings of the server that decide where the engines go and what memory they get.
_PLANNED = {"kv_cache_bytes", "max_concurrency", "kv_cache_free_gpu_mem_fraction", "gpu_device_ids"}
_PLANNED |= {"orchestrator", "spawn_processes", "fast_logits", "chunked_context", "engine_parameters"}


def build_graph(spec: Spec, *, compile: bool = True) -> Graph:
    """The steps that `spec` asks for.

    Args:
        spec: what to build.
        compile: compile engines for TensorRT-LLM; False prepares everything else, for a later build on a GPU host.

    Raises:
        TrtspecError: the two output directories overlap.
    """
    steps = _Steps(spec, compile).all()
    needed = max(step.gpus for step in steps)
    return Graph(steps, spec.engines_dir.resolve(), gpus=min(spec.hardware.num_gpus, len(look().gpus)) if needed else 0)


def check_plan(spec: Spec) -> None:
    """Refuse a spec that a build would refuse before it converts or writes anything; reads no weights.

    Raises:
        TrtspecError: as `_Steps.planned`, or a model that cannot be opened.
    """
    _Steps(spec, compile=False).planned()


class _Steps:
    """The steps of one spec; each method makes one of them."""

    def __init__(self, spec: Spec, compile: bool) -> None:
        self.spec = spec
        self.compile = compile
        self.sources = Sources(spec)
        self.on_llm_api = spec.engine.track == "llmapi"
        self.stages = stages(LLM_API if self.on_llm_api else spec.engine.runtime)
        self.roles = list(spec.models)
        # Resolved, so that what is staged beside an output is on the same file system.
        self.engines_dir, self.model_repo = spec.engines_dir.resolve(), spec.model_repo_dir.resolve()
        if self.engines_dir.is_relative_to(self.model_repo) or self.model_repo.is_relative_to(self.engines_dir):
            raise TrtspecError(
                f"lies inside the engines directory {self.engines_dir} or around it",
                where=spec.where(("output", "model_repo")),
                fix="choose two directories of which neither contains the other",
            )

    def all(self) -> list[Step]:
        steps = [self.resolve()]
        if len(self.roles) > 1:
            steps.append(self.pair())
        steps.append(self.plan())
        for before, stage in zip((None, *self.stages), self.stages, strict=False):
            steps += [self.stage(stage, before, role) for role in self.roles]
        if not self.on_llm_api:
            steps.append(self.engines())
        elif self.spec.speculation.heads:
            steps.append(self.heads())
        steps.append(self.repository())
        return [*steps, self.manifest(steps)]

    def resolve(self) -> Step:
        """Open the models and check that they are whole."""

        def run(task: Task) -> dict[str, Any]:
            models = {}
            for role in self.roles:
                source = self.sources.open(role)
                source.check()
                models[role] = {"fingerprint": source.fingerprint(), "config": asdict(source.config)}
            return models | {"heads": self.sources.heads_fingerprint()}

        def actions(results: Results) -> list[str]:
            opened = [f"open {role} {self.spec.models[role].model}" for role in self.roles]
            heads = self.spec.speculation.heads
            return [*opened, f"open the {self.spec.speculation.method} weights {heads}"] if heads else opened

        return Step(
            "resolve",
            run,
            peek=not self.sources.any_is_remote(),
            inputs=lambda results: self.sources.listings(),
            actions=actions,
            code=("models",),
        )

    def pair(self) -> Step:
        """Check that each model that proposes fits the target."""

        def run(task: Task) -> dict[str, Any]:
            from trtspec.models.pair import check_pair

            verdicts = {}
            for verifier, role in self.spec.pairs:
                verdict = check_pair(self.sources.open(verifier), self.sources.open(role), verifier=verifier)
                if verdict.verdict == "refuse":
                    raise TrtspecError(
                        f"the {role} does not fit the {verifier}: {verdict.reasons[0]}",
                        where=self.spec.where(role_key(role)),
                    )
                if verifier != "target":
                    continue
                if verdict.verdict == "accept_with_note":
                    for reason in verdict.reasons:
                        task.note(reason)
                verdicts[role] = asdict(verdict)
            return verdicts

        return Step(
            "pair",
            run,
            peek=True,
            needs=("resolve",),
            inputs=self._models,
            actions=lambda results: ["compare the tokenizers, vocabularies, special ids and contexts"],
            code=("models",),
        )

    def plan(self) -> Step:
        """Set each engine's limits and check that everything fits into memory."""

        def run(task: Task) -> dict[str, Any]:
            facts = self.planned()
            for note in facts["notes"]:
                task.note(note)
            return facts

        def inputs(results: Results) -> dict[str, Any]:
            return {
                **self._models(results),
                "heads": results["resolve"].facts["heads"],
                **self._sections("target", "speculation", "hardware", "engine"),
                "serving": self.spec.serving.model_dump(mode="json", include=_PLANNED),
                "memory": limits.memory_bytes(),
            }

        return Step(
            "plan",
            run,
            peek=True,
            needs=("resolve",),
            inputs=inputs,
            actions=lambda results: ["set the limits of the engines, add up weights and KV caches"],
            code=("build/limits.py", "spec/gpus.py", "trtllm", "build/runtimes", "models"),
        )

    def planned(self) -> dict[str, Any]:
        """Limits and memory of the engines, as JSON, from the configs of the models and the headers of heads.

        Raises:
            TrtspecError: a model that cannot be converted or split as the spec says, heads or modules that are missing
                or another model's, settings that the runtime does not have, or more memory than there is.
        """
        configs = {role: self.sources.open(role).config for role in self.roles}
        for role, config in configs.items():
            for stage in self.stages:
                stage.check(self._job(role, {}), config, self.spec)
        facts = limits.plan(self.spec, configs, self._drafting_weights(configs["target"]))
        if self.on_llm_api:
            facts["notes"] += llmapi.remarks(self.spec)
        return facts

    def _drafting_weights(self, target: ModelConfig) -> int:
        """How many weights the target's engine has to draft with; 0 where it does not draft."""
        speculation = self.spec.speculation
        if speculation.method == "medusa" and speculation.medusa and (directory := self.sources.heads()):
            from trtspec.models.medusa import open_medusa

            heads = open_medusa(directory)
            heads.check(target, speculation.medusa)
            return heads.num_weights(speculation.medusa.num_heads)
        if speculation.method == "mtp":
            from trtspec.models.mtp import check_mtp, num_module_weights

            source, num_modules = self.sources.open("target"), (speculation.mtp or Mtp()).num_modules
            check_mtp(source, num_modules)
            return num_module_weights(source, num_modules)
        return 0

    def stage(self, stage: Stage, before: Stage | None, role: str) -> Step:
        """One stage on the way from the model of `role` to its engine."""
        needs = ["resolve", *(["pair"] if len(self.roles) > 1 else []), "plan"]
        if before is not None:
            needs.append(f"{before.name}:{role}")

        def inputs(results: Results) -> dict[str, Any]:
            source: dict[str, Any] = {"source": self._source(role, results)}
            if before is not None:
                source |= {before.name: results[f"{before.name}:{role}"].output_hash}
            return source | stage.inputs(self._job(role, results))

        def run(task: Task) -> dict[str, Any]:
            source = self._source(role, task.results)
            stamp = {
                "source": source["model"],
                "source_fingerprint": source["fingerprint"],
                "spec_hash": digest(inputs(task.results)),
            }
            return stage.run(self._job(role, task.results), self.sources.open(role), task, stamp)

        return Step(
            f"{stage.name}:{role}",
            run,
            needs=tuple(needs),
            inputs=inputs,
            actions=lambda results: stage.actions(self._job(role, results)),
            output=stage.output(self._job(role, {})),
            code=stage.code,
            gpus=stage.gpus(self._job(role, {})),
        )

    def heads(self) -> Step:
        """Lay out the heads beside the model that they go on, for a runtime that loads them itself."""

        def run(task: Task) -> dict[str, Any]:
            from trtspec.models.export import link

            directory = self.sources.heads()
            assert directory is not None
            link(directory, task.destination, task.advance)
            return {}

        output = self.engines_dir / "heads"
        return Step(
            "heads",
            run,
            needs=("resolve",),
            inputs=lambda results: {"heads": results["resolve"].facts["heads"]},
            actions=lambda results: [f"lay out {self.spec.speculation.heads} in {output}"],
            output=output,
            code=("models/export.py",),
        )

    def engines(self) -> Step:
        """Check that the built engines can work together."""

        def run(task: Task) -> dict[str, Any]:
            from trtspec.runtime.engine import EngineConfig, check_engine_pair

            configs = {role: EngineConfig.load(self.engines_dir / role) for role in self.roles}
            asked = max(self.spec.speculation.num_draft_tokens, self.spec.default_num_draft_tokens)
            method, cascade = METHODS.get(self.spec.speculation.method), self.spec.speculation.cascade
            pairs = method.pairs(configs) if method and method.engines else (("target", ""),)
            for verifier, proposer in pairs:
                check_engine_pair(
                    configs[verifier],
                    configs.get(proposer),
                    cascade.num_draft_tokens if cascade and verifier != "target" else asked,
                    pipeline=self.spec.source,
                    draft_logits=self.spec.speculation.acceptance == "logits",
                )
            return {}

        return Step(
            "engines",
            run,
            peek=True,
            needs=self._last_stages,
            inputs=lambda results: {**self._engine_outputs(results), **self._drafting()},
            actions=lambda results: ["check that the engines agree"],
            code=("runtime/engine.py",),
        )

    def repository(self) -> Step:
        """Write the Triton model repository."""

        def run(task: Task) -> dict[str, Any]:
            if self.on_llm_api:
                from trtspec.triton.llmapi_repository import write_llmapi_repository

                mount = self.spec.serving.mount_point.rstrip("/")
                write_llmapi_repository(out_dir=task.destination, spec=self.spec, model_path=f"{mount}/target")
                return {}
            from trtspec.triton.repository import write_repository

            target = self.sources.open("target")
            write_repository(
                out_dir=task.destination,
                spec=self.spec,
                engines={role: self.engines_dir / role for role in self.roles},
                tokenizer_json=target.tokenizer_json(),
                add_bos=target.add_bos,
                chat_template=target.chat_template,
                kv_cache_bytes={
                    role: memory["kv_cache"] for role, memory in task.results["plan"].facts["memory"].items()
                },
                kv_cache_fractions=task.results["plan"].facts["kv_cache_fractions"],
            )
            return {}

        def inputs(results: Results) -> dict[str, Any]:
            return {
                **self._engine_outputs(results),
                **self._drafting(),
                "target": self._source("target", results),
                "engine": self.spec.engine.model_dump(mode="json"),
                **self._sections("hardware", *(["target", "speculation"] if self.on_llm_api else [])),
                "serving": self.spec.serving.model_dump(mode="json", exclude=_LAUNCH_ONLY),
                "memory": results["plan"].facts["memory"],
                "kv_cache_fractions": results["plan"].facts["kv_cache_fractions"],
            }

        return Step(
            "repository",
            run,
            needs=("resolve", "plan", *([] if self.on_llm_api else ["engines"]), *self._last_stages),
            inputs=inputs,
            actions=lambda results: [f"write the model repository to {self.model_repo}"],
            output=self.model_repo,
            code=(
                *("triton/repository.py", "triton/llmapi_repository.py", "triton/contract.py", "triton/check.py"),
                *("triton/check_engine.py", "triton/engine_parameters.py", "triton/pbtxt.py", "triton/replacing.py"),
                *("triton/models", "trtllm/llmapi.py", "trtllm/placement.py", "decoding"),
            ),
        )

    def manifest(self, steps: list[Step]) -> Step:
        """Record what was built from what."""
        outputs = {step.name: step.output for step in steps}
        path = self.engines_dir / "manifest.json"

        def run(task: Task) -> dict[str, Any]:
            models = {role: self._source(role, task.results) for role in self.roles}
            content = manifest.manifest(self.spec, models, task.results, outputs, task.ran)
            task.destination.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            return {}

        def inputs(results: Results) -> dict[str, Any]:
            records = ((name, results[name]) for name in outputs)
            return {
                "spec": [str(self.spec.source), self.spec.hash()],
                **{name: [record.input_hash, record.output_hash, record.finished_at] for name, record in records},
            }

        return Step(
            "manifest",
            run,
            needs=tuple(outputs),
            inputs=inputs,
            actions=lambda results: [f"write {path}"],
            output=path,
            code=("build/manifest.py", "build/machine.py"),
        )

    def _job(self, role: str, results: Results) -> EngineJob:
        if "plan" in results:
            build_config = results["plan"].facts["engines"][role]
        else:
            build_config = limits.build_config(self.spec, role, None)
        return EngineJob(
            role=role,
            model=self.spec.models[role],
            engine=self.spec.engine,
            speculation=self.spec.speculation,
            calibration=self.spec.calibration,
            calibration_path=self.spec.calibration_path,
            heads=self.sources.heads() if role == "target" and "resolve" in results else None,
            mode=limits.mode(self.spec, role),
            build_config=build_config,
            sm=self.spec.hardware.sm,
            num_gpus=self.spec.hardware.num_gpus,
            compile=self.compile,
            engines_dir=self.engines_dir,
        )

    def _source(self, role: str, results: Results) -> dict[str, Any]:
        ref = self.spec.models[role]
        facts = results["resolve"].facts
        source = {"model": ref.model, "gguf_file": ref.gguf_file, "fingerprint": facts[role]["fingerprint"]}
        if role == "target" and facts["heads"]:
            source |= {"heads": self.spec.speculation.heads, "heads_fingerprint": facts["heads"]}
        return source

    def _models(self, results: Results) -> dict[str, Any]:
        return {role: results["resolve"].facts[role] for role in self.roles}

    @property
    def _last_stages(self) -> tuple[str, ...]:
        """Names of the steps that make the engines."""
        return tuple(f"{self.stages[-1].name}:{role}" for role in self.roles)

    def _engine_outputs(self, results: Results) -> dict[str, Any]:
        return {name: results[name].output_hash for name in self._last_stages}

    def _sections(self, *names: str) -> dict[str, Any]:
        return {f"spec {name}": getattr(self.spec, name).model_dump(mode="json") for name in names}

    def _drafting(self) -> dict[str, Any]:
        """What of the speculation the pipeline sees; the draft model itself is in its engine."""
        speculation = self.spec.speculation.model_dump(mode="json", exclude={"draft"})
        return {"speculation": speculation, "default_num_draft_tokens": self.spec.default_num_draft_tokens}
