"""Rollout tokens per second: the native engine against ``model.generate`` of the same model, prompts and dtype.

    python benchmarks/rollout.py                 # tiny and small, float32 and bfloat16, one and two threads
    python benchmarks/rollout.py --quick         # tiny, float32, one thread
    python benchmarks/rollout.py --scaling       # native tokens/s and cache size against group, completion, prompt length
    python benchmarks/rollout.py --model FOLDER  # a real model: 16 completions of 48 tokens of one prompt
    python benchmarks/rollout.py --model FOLDER --shots 8  # one completion each of 24 problems behind 8 worked examples
    python benchmarks/rollout.py --profile       # where the time of one native rollout goes

Each side of a case runs in a process of its own, ours set up as algorist's are. No model has an end token, so every completion is
of full length and both sides do the same work. Weights are random.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from measure import InOwnProcess, compare, median_with_interval, ratio_with_interval, save_json
from models import load_model, word_problems
from transformers import Qwen2Config, Qwen2ForCausalLM

from algorist.models.host_memory import keep_freed_memory
from algorist.models.precision import compute_dtype, set_compute
from algorist.rollouts.base import SamplingParams
from algorist.rollouts.native import decoder_tier
from algorist.rollouts.native.engine import NativeEngine

PAD = 0
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "mixed": torch.float32}
"""``mixed``: bfloat16 products over float32 weights, which is how a policy is trained; ``generate`` then runs under autocast."""


@dataclass(frozen=True)
class Case:
    """One model and one batch of rollouts."""

    name: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    tied: bool
    prompts: int
    group_size: int
    max_new: int
    shortest: int = 64
    longest: int = 128
    floor: float = 0.0
    aim: float = 0.0


TINY = Case("tiny_128_rows", 256, 192, 512, 4, 6, 2, False, 8, 16, 192, floor=4.5, aim=8.0)
SMALL = Case("small_64_rows", 32000, 512, 768, 8, 8, 2, True, 4, 16, 128, floor=2.8, aim=5.0)
CASES = {
    "tiny": TINY,
    "small64": SMALL,
    "model": Case("model_16_rows", 0, 0, 0, 0, 0, 0, True, 1, 16, 48, floor=3.0, aim=4.0),
    "small32": replace(SMALL, name="small_32_rows", prompts=2, floor=1.7, aim=3.0),
}


def make_config(case: Case) -> Qwen2Config:
    """Return the config of a case's model."""
    return Qwen2Config(
        vocab_size=case.vocab,
        hidden_size=case.hidden,
        intermediate_size=case.intermediate,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads,
        max_position_embeddings=8192,
        tie_word_embeddings=case.tied,
        eos_token_id=None,
        pad_token_id=PAD,
        bos_token_id=None,
    )


def make_model(case: Case, dtype: torch.dtype) -> Qwen2ForCausalLM:
    """Return a random model without an end token."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(make_config(case)).eval().to(dtype)


def make_prompts(case: Case) -> list[list[int]]:
    """Return random prompts of ``shortest`` to ``longest`` tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(case.shortest, case.longest + 1, (case.prompts,), generator=generator).tolist()
    return [torch.randint(2, case.vocab, (n,), generator=generator).tolist() for n in lengths]


def prepared(case: Case, dtype: str, name: str | None) -> tuple[Any, list[list[int]]]:
    """Return the model (a real one by name, else random weights), and its prompts; it has no end token."""
    if name is None:
        model, prompts = make_model(case, DTYPES[dtype]), make_prompts(case)
    else:
        model, tokenizer = load_model(name)
        model = model.to(DTYPES[dtype]).eval()
        prompts = [tokenizer(text)["input_ids"] for text in word_problems(case.prompts)]
        model.config.eos_token_id = model.generation_config.eos_token_id = None
    if dtype == "mixed":
        set_compute(model, torch.bfloat16)
    return model, prompts


def with_generate(model: Any, prompts: list[list[int]], case: Case) -> Callable[[], float]:
    """Return a function that samples all rows with ``model.generate`` and counts the tokens."""
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), PAD)
    mask = torch.zeros_like(ids)
    for i, prompt in enumerate(prompts):
        ids[i, longest - len(prompt) :] = torch.tensor(prompt)
        mask[i, longest - len(prompt) :] = 1
    ids, mask = ids.repeat_interleave(case.group_size, 0), mask.repeat_interleave(case.group_size, 0)

    def run() -> float:
        mixed = compute_dtype(model) != model.dtype
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            out = model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=case.max_new,
                pad_token_id=PAD,
                eos_token_id=None,
            )[:, longest:]
        return float(out.numel())

    return run


def with_engine(engine: Any, prompts: list[list[int]], case: Case) -> Callable[[], float]:
    """Return a function that samples all rows with an engine and counts the tokens."""
    params = SamplingParams(max_new_tokens=case.max_new)

    def run() -> float:
        groups = engine.generate(prompts, case.group_size, params)
        return float(sum(len(c.token_ids) for group in groups for c in group))

    return run


def one_side(case: Case, dtype: str, threads: int, tier: str | None, name: str | None) -> Callable[[], float]:
    """Return ``with_engine`` of a tier, in a process that is set up as algorist's are, or ``with_generate``."""
    torch.set_num_threads(threads)
    model, prompts = prepared(case, dtype, name)
    if tier is None:
        return with_generate(model, prompts, case)
    keep_freed_memory()
    return with_engine(NativeEngine(model, tier=tier), prompts, case)


def run_case(
    case: Case, dtype: str, threads: int, repeats: int, tiers: list[str], name: str | None = None
) -> dict[str, Any]:
    """Measure one case, of random weights or of a real model, and print its line."""
    variants = {
        ("generate" if tier is None else f"native_{tier}"): InOwnProcess(
            one_side, case, dtype, threads, tier, name
        )
        for tier in (None, *tiers)
    }
    samples = compare(variants, repeats=repeats, warmup=1)
    for side in variants.values():
        side.close()
    ratios, cpu_ratios = (
        {
            name: ratio_with_interval(samples[name][clock], samples["generate"][clock])
            for name in variants
            if name != "generate"
        }
        for clock in ("rates", "cpu_rates")
    )
    for name, ratio in ratios.items():
        print(
            f"{case.name:14} {dtype:9} {threads} thread(s)  {name:15} {samples[name]['rate']['median']:8.0f} tok/s  "
            f"generate {samples['generate']['rate']['median']:7.0f}  ratio {ratio['ratio']:.2f} "
            f"[{ratio['low']:.2f}, {ratio['high']:.2f}] (processor time {cpu_ratios[name]['ratio']:.2f})  floor {case.floor} aim {case.aim}",
            flush=True,
        )
    return {
        "case": asdict(case),
        "dtype": dtype,
        "threads": threads,
        "tokens_per_s": samples,
        "ratio_to_generate": ratios,
        "ratio_to_generate_processor_time": cpu_ratios,
    }


def run_shots(shots: int, dtype: str, threads: int, repeats: int, name: str) -> dict[str, Any]:
    """Measure problems behind the same worked examples: computed once, once per problem, and ``generate``."""
    torch.set_num_threads(threads)
    case = Case("few_shot", 0, 0, 0, 0, 0, 0, True, 24, 1, 32)
    model, problems = prepared(replace(case, prompts=case.prompts + shots), dtype, name)
    examples = [token for problem in problems[:shots] for token in problem]
    prompts = [examples + problem for problem in problems[shots:]]
    ours = with_engine(NativeEngine(model), prompts, case)

    def each_on_its_own() -> float:
        with mock.patch.object(decoder_tier, "_PREFIX_SAVES", 10**12):
            return ours()

    generate = with_generate(model, prompts, case)
    samples = compare(
        {"native": ours, "each_on_its_own": each_on_its_own, "generate": generate}, repeats, warmup=1
    )
    found: dict[str, Any] = {
        "shots": shots, "common_tokens": decoder_tier.common_prefix(prompts), "dtype": dtype, "threads": threads, "samples": samples,
    }  # fmt: skip
    for other in ("each_on_its_own", "generate"):
        ratio = ratio_with_interval(samples["native"]["cpu_rates"], samples[other]["cpu_rates"])
        found[f"ratio_to_{other}_processor_time"] = ratio
        print(
            f"{shots} shots ({found['common_tokens']} tokens in common), {dtype}, {threads} thread(s): {ratio['ratio']:.2f}× "
            f"[{ratio['low']:.2f}, {ratio['high']:.2f}] {other} in processor time",
            flush=True,
        )
    return found


def run_scaling(repeats: int, threads: int) -> list[dict[str, Any]]:
    """Native tokens/s of the tiny model against group size, completion length and prompt length; no early ends."""
    torch.set_num_threads(threads)
    base = replace(TINY, prompts=4, group_size=16, max_new=128, shortest=64, longest=64)
    cases = [replace(base, name=f"group_{g}", group_size=g) for g in (2, 4, 8, 16, 32, 64)]
    cases += [replace(base, name=f"completion_{n}", group_size=8, max_new=n) for n in (64, 256, 1024, 2048)]
    cases += [
        replace(base, name=f"prompt_{n}", max_new=64, shortest=n, longest=n) for n in (64, 256, 1024, 2048)
    ]
    found = []
    for case in cases:
        model = make_model(case, torch.float32)
        engine = NativeEngine(model)
        run = with_engine(engine, make_prompts(case), case)
        run()
        rates = []
        for _ in range(repeats):
            start = time.perf_counter()
            rates.append(run() / (time.perf_counter() - start))
        per_token = 2 * 4 * case.layers * case.kv_heads * case.hidden // case.heads
        cached = case.prompts * (case.longest + case.group_size * case.max_new)
        unshared = case.prompts * case.group_size * (case.longest + case.max_new)
        row = {
            "case": asdict(case),
            "rate": median_with_interval(rates),
            "cache_mib": cached * per_token / 2**20,
            "cache_mib_unshared": unshared * per_token / 2**20,
        }
        print(
            f"{case.name:16} {row['rate']['median']:8.0f} tok/s  cache {row['cache_mib']:7.1f} MiB "
            f"(prompts not shared: {row['cache_mib_unshared']:7.1f})",
            flush=True,
        )
        found.append(row)
    return found


def run_profile(case: Case, dtype: str, threads: int, name: str | None = None) -> str:
    """Return torch's profile table of one native rollout."""
    torch.set_num_threads(threads)
    model, prompts = prepared(case, dtype, name)
    run = with_engine(NativeEngine(model), prompts, case)
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=22)


def main() -> None:
    """Parse the arguments, measure, write ``benchmarks/baselines/rollout*.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", default="tiny,small64,small32")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="float32, bfloat16, mixed")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--tiers", default="auto", help="auto, module, or both with a comma")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", help="folder or hub name of a model, instead of --cases")
    parser.add_argument(
        "--shots", type=int, default=0, help="with --model: worked examples before each problem"
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--scaling", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", default="", help="name of the JSON file")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.cases, arguments.dtypes, arguments.threads = "tiny", "float32", "1"
    if arguments.model:
        arguments.cases = "model"
    names, dtypes = arguments.cases.split(","), arguments.dtypes.split(",")
    threads = [int(t) for t in arguments.threads.split(",")]
    settings = {**vars(arguments), "model": arguments.model and Path(arguments.model).name}
    if arguments.profile:
        print(run_profile(CASES[names[0]], dtypes[0], threads[0], arguments.model))
        return
    if arguments.scaling:
        rows = run_scaling(arguments.repeats, threads[0])
        print(save_json(arguments.out or "rollout_scaling", {"threads": threads[0], "results": rows}))
        return
    if arguments.shots:
        shots = [
            run_shots(arguments.shots, d, t, arguments.repeats, arguments.model)
            for d in dtypes
            for t in threads
        ]
        print(save_json(arguments.out or "rollout_shots", {"settings": settings, "results": shots}))
        return
    results = [
        run_case(CASES[name], dtype, count, arguments.repeats, arguments.tiers.split(","), arguments.model)
        for name in names
        for dtype in dtypes
        for count in threads
    ]
    payload = {"settings": settings, "results": results}
    print(save_json(arguments.out or ("rollout_quick" if arguments.quick else "rollout"), payload))


if __name__ == "__main__":
    main()
