"""The trainer on GPUs: fused kernels against eager ones, and two GPUs against one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fuselm.train.config import to_json

WORKER = Path(__file__).parent / "run_configs.py"


@pytest.fixture(scope="module")
def train(make_config, launch, losses_of, tmp_path_factory):
    """train(name, gpus, **overrides): losses by step of a run in processes of its own."""
    folder = tmp_path_factory.mktemp("gpu")

    def run(name: str, gpus: int, kernels: str, **overrides) -> dict[int, float]:
        config = make_config(folder, parallel__device="cuda", training__steps=20, optimizer__lr=5e-4, **overrides)
        parallel = dataclasses.replace(config.parallel, param_dtype="bfloat16")
        model = dataclasses.replace(config.model, kernels=kernels, vocab_size=320, dim=128, ffn_dim=256)
        config = dataclasses.replace(config, name=name, model=model, parallel=parallel)
        (folder / f"{name}.json").write_text(to_json(config))
        for code, _, errors in launch([str(WORKER), str(folder / f"{name}.json")], gpus).wait():
            assert code == 0, errors
        return losses_of(folder / name)

    return run


@pytest.mark.gpu
def test_triton_and_eager_runs_agree(train):
    triton, eager = train("triton", 1, "triton"), train("eager", 1, "eager")
    for step in range(1, 21):
        assert triton[step] == pytest.approx(eager[step], rel=5e-3)


@pytest.mark.gpu2
def test_two_gpus_have_the_losses_of_one(train):
    one = train("one", 1, "triton")
    two = train("two", 2, "triton", training__micro_batch_size=4)
    assert two == pytest.approx(one, rel=1e-3)
