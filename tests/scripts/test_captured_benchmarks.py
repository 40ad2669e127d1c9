"""Small scripts of `benchmarks/by_hand` train the same with their modules captured; with graphs of `graphs_on_cpu.py`."""

import shutil
from pathlib import Path

import pytest
from graphs_on_cpu import Recorder
from samples import REPOSITORY

from compile_sweep.script.apply import module_call
from tests.scripts.conftest import Run

pytestmark = [
    pytest.mark.nightly("test_captured_scripts.py captures seven other scripts"),
    pytest.mark.filterwarnings("ignore"),
]

TEXT = "--layers 2 --heads 2 --width 16 --length 12 --batch 2 --vocabulary 60"

SCRIPTS = {
    "bert_script.py": (TEXT, {""}),
    "clip_script.py": ("--layers 2 --heads 2 --width 16 --pixels 32 --length 6 --vocabulary 60 --batch 3", {""}),
    "convnext_script.py": ("--width 8 --depth 2 --pixels 32 --batch 2 --classes 5", {""}),
    "gan_script.py": ("--width 8 --pixels 16 --batch 4", {""}),
    "gpt2_script.py": (TEXT, {""}),
    "llama_script.py": (TEXT, {""}),
    "lora_script.py": (TEXT, {"model.layers.0", "model.layers.1"}),
    "tabular_script.py": ("--categories 3 --entries 20 --width 4 --batch 8", {""}),
    "trainer_script.py": ("--layers 2 --heads 2 --width 16 --pixels 32 --batch 2 --classes 5", {""}),
    "unet_script.py": ("--width 16 --pixels 16 --batch 2", {""}),
    "unet3d_script.py": ("--width 4 --levels 2 --voxels 8 --batch 1 --classes 3", {""}),
    "frozen_networks/dino_script.py": ("--layers 1 --heads 2 --width 16 --batch 2 --prototypes 16", {""}),
    "frozen_networks/distill_script.py": ("--width 8 --pixels 32 --batch 2 --classes 5", {""}),
    "frozen_networks/dpo_script.py": (TEXT, set[str]()),  # makes a cache
    "frozen_networks/vlm_script.py": ("--layers 1 --heads 2 --width 16 --pixels 32 --length 8 --batch 2 --vocabulary 60", {""}),
    "further_fields/flow_script.py": ("--width 8 --levels 2 --depth 2 --pixels 8 --batch 4", {""}),
    "further_fields/graph_attention_script.py": (
        "--nodes 200 --edges 800 --features 8 --width 4 --heads 2 --layers 2 --classes 5",
        {""},
    ),
    "further_fields/point_cloud_script.py": ("--batch 4 --points 64 --width 8 --neighbors 4", {""}),
    "further_fields/retrieval_script.py": ("--batch 4 --longest 32 --width 32 --layers 2", {""}),
    "further_fields/soft_actor_critic_script.py": (
        "--width 16 --observation 8 --action 3 --batch 16 --environments 4 --buffer 1000",
        {""},
    ),
    "further_fields/state_space_script.py": ("--width 16 --layers 2 --state 4 --length 12 --batch 2 --vocabulary 60", {""}),
    "further_fields/world_model_script.py": ("--batch 2 --length 5 --width 4 --state 16 --stochastic 4", {""}),
    "other_fields/cyclegan_script.py": ("--width 4 --blocks 1 --size 64 --batch 1", {""}),
    "other_fields/forecasting_script.py": ("--width 32 --layers 1 --series 3 --batch 4 --context 64", {""}),
    "other_fields/grpo_script.py": ("--layers 2 --width 64 --questions 2 --answers 2 --length 8 --vocabulary 60", {""}),
    "other_fields/lstm_script.py": ("--layers 2 --width 16 --length 6 --batch 2 --vocabulary 60", {""}),
    "other_fields/momentum_contrast_script.py": ("--size 32 --batch 4 --channels 4 --depths 1 1 1 1 --queue 64", {"encoder"}),
    "other_fields/muon_script.py": (TEXT, {""}),
    "other_fields/ppo_script.py": ("--environments 8 --horizon 4 --width 16 --observation 4 --minibatches 2 --epochs 2", {""}),
    "other_fields/radiance_field_script.py": ("--rays 8 --coarse 4 --fine 4 --width 16", {""}),
    "other_fields/recurrent_translation_script.py": ("--width 16 --length 8 --batch 4 --vocabulary 50", {""}),
    "other_fields/set_detection_script.py": ("--size 64 --batch 2 --width 32 --layers 1 --channels 4 --depths 1 1 1 1", {""}),
    "other_fields/super_resolution_script.py": ("--blocks 1 --width 8 --grow 4 --patch 8 --batch 2", {""}),
    "other_fields/translation_script.py": ("--width 16 --layers 1 --heads 2 --words 60 --vocabulary 50 --longest 12", set[str]()),
    "other_fields/vqgan_script.py": ("--width 32 --codes 8 --size 64 --batch 2 --critic-width 4 --perceptual-width 4", {""}),
    "second_derivatives/equation_script.py": ("--layers 2 --width 8 --points 16 --edge 4", {""}),
    "second_derivatives/forces_script.py": ("--molecules 2 --atoms 4 --width 8 --layers 2 --waves 5", {""}),
    "second_derivatives/gradient_penalty_script.py": ("--batch 2 --width 4 --pixels 16 --critics 2", {""}),
}
"""Arguments, and the names of what is captured of each module: the whole has none."""


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_trains_the_same(
    script: str, run: Run, folder: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, names = SCRIPTS[script]
    monkeypatch.setattr(module_call, "_generator_states", lambda device: 0)  # dropout draws on the CPU, and replays draw again
    shutil.copy(REPOSITORY / "benchmarks" / "by_hand" / script, folder)
    losses = []
    for settings in ("scope=eager,as_written=on", "scope=eager,cudagraphs=on"):
        session, error = run(Path(script).name, settings, "--steps", "4000", *words.split())
        assert error is None
        assert session.trajectory is not None
        losses.append(session.trajectory.losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-3, nan_ok=True)  # bfloat16 gradients of two calls are added otherwise
    found = set[str]().union(*(target.captured for target in session.found.targets))
    assert found == names
    assert bool(recorder.replayed) is bool(names)
