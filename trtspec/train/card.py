"""The model card of a trained draft: README.md from the figures of acceptance.json. Text only."""

from __future__ import annotations

from typing import Any


def model_card(report: dict[str, Any]) -> str:
    """README.md; every number in it is taken from `report`, see `trtspec.train.draft`."""
    training, draft, step = report["training"], report["draft"], report["step_ms"]
    greedy = report["modes"]["greedy"]["all"]["acceptance_length"]["4"]
    head = (
        f"# Draft for {report['target']}\n\n"
        f"A draft model for speculative decoding: {greedy:.2f} tokens a target pass (greedy, 4 draft tokens, "
        f"{report['prompts']} unseen prompts), at {100 * step['ratio']:.0f} % of the time of a target step.\n\n"
        "## What it is\n\n"
        f"- {draft['layers']} decoder layers of the target's shape ({draft['stored_parameters'] / 1e6:.1f} M "
        "parameters, stored in bfloat16, run in float32 where the target is).\n"
        "- Embedding and tokenizer are the target's and are not stored; config.json holds the tokenizer's hash, and "
        "another target is refused.\n"
        f"- The head has {draft['draft_vocab_size']} rows: the target's embedding rows of the ids it uses most "
        "(tensor `d2t`: target id = row + d2t[row]). Other ids are never proposed; what is emitted is the target's "
        "choice in any case.\n\n"
        "## How it was made\n\n"
        f"{_answers(training)}, each token with the target's "
        f"{training['top_k']} largest probabilities. The layers start as the first ones of the target and are "
        f"trained on the cross-entropy with these probabilities: {training['steps']} steps, "
        f"{training['minutes']:.0f} minutes of wall time on a machine with {training['cpus']} CPUs. On training "
        f"prompts kept aside, draft and target agree on {100 * training['agreement']:.0f} % of the next tokens.\n\n"
    )
    command = f"```\n{report['command']}\n```\n"
    measured = (
        "## Measured\n\n"
        f"Along {report['answer_tokens']} tokens of the target's own answers, one greedy and one sampled a prompt; "
        "expectations of the speculative loop, exact for these texts. Acceptance length is the number of tokens a "
        "target pass, bonus token included.\n\n"
    )
    for mode, categories in report["modes"].items():
        measured += f"### {mode.capitalize()}\n\n{_table(categories)}\n"
    places = report["modes"]["greedy"]["all"]["accepted_by_position"]
    measured += (
        "Accepted, given that all before it were (greedy, by place in the draft): "
        + ", ".join(f"{100 * p:.0f} %" for p in places)
        + f".\n\nOne-token step, batch 1, {report['threads']} threads: draft {step['draft']:.1f} ms, target "
        f"{step['target']:.1f} ms.\n\nMeasure again with:\n\n" + command
    )
    return head + measured


def medusa_card(report: dict[str, Any]) -> str:
    """README.md of heads; every number in it is taken from `report`, see `trtspec.train.medusa`.

    `training.note`, a sentence that begins with a space, is for what a run did that its command does not say.
    """
    training, heads = report["training"], report["heads"]
    greedy = report["modes"]["greedy"]["all"]
    best = max(greedy["tokens_per_pass"], key=lambda name: greedy["tokens_per_pass"][name])
    text = (
        f"# Medusa heads for {report['target']}\n\n"
        f"{heads['num_heads']} heads that guess the tokens behind the next one: {greedy['tokens_per_pass'][best]:.2f} "
        f"tokens a target pass (greedy; tree: {best}; {report['prompts']} unseen prompts).\n\n"
        "## What it is\n\n"
        f"- Each head has {heads['num_layers']} layers x + silu(linear(x)) on the target's last hidden state and uses "
        f"the target's output matrix, which is not stored ({heads['stored_parameters'] / 1e6:.1f} M parameters in "
        "bfloat16, run in the engine's type).\n"
        "- The target is unchanged, and with lossless acceptance so is its output.\n"
        "- Tensor names and config.json are those of published Medusa heads; TensorRT-LLM checkpoints are made of them "
        "as of any others.\n\n"
        "## How it was made\n\n"
        f"{_answers(training)}, each token with the hidden state before it and the "
        f"target's {training['top_k']} largest probabilities. The heads begin as the target's own head and are trained "
        f"on the cross-entropy with these probabilities over the {training['vocab']} ids used most and a sample of the "
        f"others: {training['steps']} steps, {training['minutes']:.0f} minutes of wall time on a machine with "
        f"{training['cpus']} CPUs.{_losses(training)}{training.get('note', '')}\n\n```\n{report['command']}\n```\n\n"
        "## Measured\n\n"
        f"Along {report['answer_tokens']} tokens of the target's own answers, one greedy and one sampled a prompt. "
        "Tokens a target pass, the target's own token included; the trees are the best ones for the training prompts "
        "kept aside, and stand in acceptance.json.\n\n"
    )
    for mode, categories in report["modes"].items():
        trees = list(categories["all"]["tokens_per_pass"])
        rows = [[category, *(f"{c['tokens_per_pass'][t]:.2f}" for t in trees)] for category, c in categories.items()]
        text += f"### {mode.capitalize()}\n\n{_rows(['tokens a pass', *trees], rows)}\n"
        rows = [
            [str(head), *(f"{100 * share:.0f} %" for share in shares)]
            for head, shares in enumerate(categories["all"]["top_1_to_5"])
        ]
        names = [f"first {n}" if n > 1 else "first" for n in range(1, len(rows[0]))]
        text += f"Right among a head's choices:\n\n{_rows(['head', *names], rows)}\n"
    times = ", ".join(f"{tokens}: {ms:.0f} ms" for tokens, ms in report["pass_ms"].items())
    return text + (
        f"Target pass by tokens in it (root and nodes), batch 1, {report['threads']} threads: {times}.\n\n"
        f"Measure again with:\n\n```\n{report['measure_command']}\n```\n"
    )


def _answers(training: dict[str, Any]) -> str:
    """What was trained on; files of before know neither the type nor the prompts that the target wrote."""
    own = training.get("own_prompts", 0)
    written = f", {100 * own / training['answers']:.0f} % of which it wrote itself" if own else ""
    return (
        f"{training['answers']} answers of the target ({training['answer_tokens']} tokens, made in "
        f"{training.get('dtype', 'float32')}) to generated prompts{written}, three in five greedy, the others at "
        "temperature 0.7 or 1"
    )


def _losses(training: dict[str, Any]) -> str:
    """The two losses, where they are known."""
    if "loss_trained" not in training:
        return ""
    return (
        f" The loss at the end: {training['loss_trained']:.2f} on answers that were trained on, "
        f"{training['loss']:.2f} on such that were kept aside."
    )


def _table(categories: dict[str, Any]) -> str:
    lengths = list(next(iter(categories.values()))["acceptance_length"])
    rows = []
    for category, figures in categories.items():
        values = [f"{figures['acceptance_length'][n]:.2f}" for n in lengths]
        rows.append([category, *values, f"{100 * figures['acceptance_rate']['4']:.0f} %"])
    return _rows(["draft tokens", *lengths, "rate at 4"], rows)


def _rows(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    return "".join("| " + " | ".join(row) + " |\n" for row in [head, ["---"] * len(head), *rows])
