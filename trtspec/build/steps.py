"""The steps of a build, from a spec: resolve, pair, plan, one engine a model, engines, repository, manifest.

Knows which step needs what, and whom to call for it; the work is done elsewhere.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from trtspec.build import limits, manifest
from trtspec.build.fingerprint import digest
from trtspec.build.graph import Graph, Results, Step, Task
from trtspec.build.runtimes import EngineBuilder, EngineJob, engine_builder
from trtspec.build.sources import Sources
from trtspec.errors import TrtspecError
from trtspec.spec.schema import Spec

# Settings of the running server that the model repository does not contain.
_LAUNCH_ONLY = {"host", "http_port", "grpc_port", "metrics_port", "startup_timeout_s", "num_threads"}


def build_graph(spec: Spec) -> Graph:
    """The steps that `spec` asks for.

    Raises:
        TrtspecError: the two output directories overlap.
    """
    return Graph(_Steps(spec).all(), spec.engines_dir.resolve())


class _Steps:
    """The steps of one spec; each method makes one of them."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.sources = Sources(spec)
        self.builder: EngineBuilder = engine_builder(spec.engine.runtime)
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
        steps += [self.plan(), *(self.engine(role) for role in self.roles), self.engines(), self.repository()]
        return [*steps, self.manifest(steps)]

    def resolve(self) -> Step:
        """Open the models and check that they are whole."""

        def run(task: Task) -> dict[str, Any]:
            models = {}
            for role in self.roles:
                source = self.sources.open(role)
                source.check()
                models[role] = {"fingerprint": source.fingerprint(), "config": asdict(source.config)}
            return models

        return Step(
            "resolve",
            run,
            peek=not any(self.sources.is_remote(role) for role in self.roles),
            inputs=lambda results: {role: self.sources.listing(role) for role in self.roles},
            actions=lambda results: [f"open {role} {self.spec.models[role].model}" for role in self.roles],
            code=("models",),
        )

    def pair(self) -> Step:
        """Check that the draft fits the target."""

        def run(task: Task) -> dict[str, Any]:
            from trtspec.models.pair import check_pair

            verdict = check_pair(self.sources.open("target"), self.sources.open("draft"))
            if verdict.verdict == "refuse":
                raise TrtspecError(
                    f"the draft does not fit the target: {verdict.reasons[0]}",
                    where=self.spec.where(("speculation", "draft")),
                )
            if verdict.verdict == "accept_with_note":
                for reason in verdict.reasons:
                    task.note(reason)
            return asdict(verdict)

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
            facts = limits.plan(self.spec, {role: self.sources.open(role).config for role in self.roles})
            for note in facts["notes"]:
                task.note(note)
            return facts

        def inputs(results: Results) -> dict[str, Any]:
            return {
                **self._models(results),
                **self._sections("target", "speculation", "hardware", "engine"),
                "serving": self.spec.serving.model_dump(mode="json", include={"kv_cache_bytes", "max_concurrency"}),
                "memory": limits.memory_bytes(),
            }

        return Step(
            "plan",
            run,
            peek=True,
            needs=("resolve",),
            inputs=inputs,
            actions=lambda results: ["set the limits of the engines, add up weights and KV caches"],
            code=("build/limits.py", "spec/gpus.py", "trtllm"),
        )

    def engine(self, role: str) -> Step:
        """Build the engine of one model."""

        def inputs(results: Results) -> dict[str, Any]:
            return {"source": self._source(role, results), **self.builder.inputs(self._job(role, results))}

        def run(task: Task) -> dict[str, Any]:
            source = self._source(role, task.results)
            stamp = {
                "source": source["model"],
                "source_fingerprint": source["fingerprint"],
                "spec_hash": digest(inputs(task.results)),
            }
            job = self._job(role, task.results)
            return self.builder.build(job, self.sources.open(role), task.destination, stamp, task.advance)

        return Step(
            f"engine:{role}",
            run,
            needs=("resolve", *(["pair"] if len(self.roles) > 1 else []), "plan"),
            inputs=inputs,
            actions=lambda results: self.builder.actions(self._job(role, results)),
            output=self.engines_dir / role,
            code=self.builder.CODE,
        )

    def engines(self) -> Step:
        """Check that the built engines can work together."""

        def run(task: Task) -> dict[str, Any]:
            from trtspec.runtime.engine import EngineConfig, check_engine_pair

            configs = {role: EngineConfig.load(self.engines_dir / role) for role in self.roles}
            check_engine_pair(
                configs["target"],
                configs.get("draft"),
                max(self.spec.speculation.num_draft_tokens, self.spec.default_num_draft_tokens),
                pipeline=self.spec.source,
                draft_logits=self.spec.speculation.acceptance == "logits",
            )
            return {}

        return Step(
            "engines",
            run,
            peek=True,
            needs=tuple(f"engine:{role}" for role in self.roles),
            inputs=lambda results: {**self._engine_outputs(results), **self._drafting()},
            actions=lambda results: ["check that the engines agree"],
            code=("runtime/engine.py",),
        )

    def repository(self) -> Step:
        """Write the Triton model repository."""

        def run(task: Task) -> dict[str, Any]:
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
            )
            return {}

        def inputs(results: Results) -> dict[str, Any]:
            return {
                **self._engine_outputs(results),
                **self._drafting(),
                "target": self._source("target", results),
                "engine": self.spec.engine.model_dump(mode="json"),
                "serving": self.spec.serving.model_dump(mode="json", exclude=_LAUNCH_ONLY),
                "memory": results["plan"].facts["memory"],
            }

        return Step(
            "repository",
            run,
            needs=("resolve", "plan", "engines", *(f"engine:{role}" for role in self.roles)),
            inputs=inputs,
            actions=lambda results: [f"write the model repository to {self.model_repo}"],
            output=self.model_repo,
            code=("triton/repository.py", "triton/contract.py", "triton/check.py", "triton/models", "decoding"),
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
        mode = limits.mode(self.spec, role)
        return EngineJob(role, self.spec.models[role], self.spec.engine, mode, build_config, self.engines_dir / role)

    def _source(self, role: str, results: Results) -> dict[str, Any]:
        ref = self.spec.models[role]
        fingerprint = results["resolve"].facts[role]["fingerprint"]
        return {"model": ref.model, "gguf_file": ref.gguf_file, "fingerprint": fingerprint}

    def _models(self, results: Results) -> dict[str, Any]:
        return {role: results["resolve"].facts[role] for role in self.roles}

    def _engine_outputs(self, results: Results) -> dict[str, Any]:
        return {f"engine:{role}": results[f"engine:{role}"].output_hash for role in self.roles}

    def _sections(self, *names: str) -> dict[str, Any]:
        return {f"spec {name}": getattr(self.spec, name).model_dump(mode="json") for name in names}

    def _drafting(self) -> dict[str, Any]:
        """What of the speculation the pipeline sees; the draft model itself is in its engine."""
        speculation = self.spec.speculation.model_dump(mode="json", exclude={"draft"})
        return {"speculation": speculation, "default_num_draft_tokens": self.spec.default_num_draft_tokens}
