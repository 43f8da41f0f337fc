"""Every recipe: its full form has a plan that fits on the hardware it names; its small form runs whole.

The command lines are those of the recipe's page; only the model and the rows are put in their place, where the page
names what has to be downloaded.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import GPTNeoXConfig, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config

from entry import main
from launch import slurm_cluster
from tiny import alpaca_rows, byte_tokenizer, llama_config, neox_config, write_model, write_rows
from tonnage.config import SlurmLaunch, read_config
from tonnage.decide.plans import suppose
from tonnage.demo.tasks import held_out_examples, training_examples
from tonnage.files.reading import read_json
from tonnage.launch.slurm import batch_script
from tonnage.planning.machine import parse_hardware
from tonnage.planning.plan import Plan
from tonnage.rundir.directory import RunDirectory

RECIPES = Path(__file__).parents[2] / "recipes"
SHAPES: dict[str, PreTrainedConfig] = {
    "databricks/dolly-v2-3b": GPTNeoXConfig(
        vocab_size=50280,
        hidden_size=2560,
        intermediate_size=10240,
        num_hidden_layers=32,
        num_attention_heads=32,
        max_position_embeddings=2048,
    ),
    "meta-llama/Llama-2-70b-chat-hf": LlamaConfig(
        vocab_size=32000,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=4096,
    ),
    "Qwen/Qwen2.5-1.5B": Qwen2Config(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
    ),
    "Qwen/Qwen2.5-0.5B": Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
    "meta-llama/Llama-3.1-8B-Instruct": LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
    ),
    "HuggingFaceTB/SmolLM2-135M-Instruct": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "mistralai/Mistral-7B-Instruct-v0.3": MistralConfig(
        vocab_size=32768,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=32768,
        sliding_window=None,
    ),
}
"""Published shapes of the models, without weights."""
TEXTS = ["data.train=[{path: rows, columns: {text: content}}]"]
"""Where rows of the hub would be read."""
ROWS = {
    "dolly-v2-3b": ["data.train=alpaca_data.json"],
    "llama-2-70b": [*TEXTS, TEXTS[0].replace("train", "validation").replace("rows,", "rows, split: test,")],
}
"""What stands for the rows of a full form that are on the hub."""
SEES = "shapes-laptop"
"""Whose page makes its own model."""
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
ELSEWHERE_TOO = ("dolly-v2-3b", "one-24gb-gpu", "nf4-7b-laptop")
"""Whose small form is of the matrix: other tests run what they have of their own."""


def command(name: str, kind: str) -> list[str]:
    """The words of the page's one command line of a kind."""
    page = (RECIPES / f"{name}.md").read_text().replace("\\\n", " ")
    (line,) = re.findall(rf"^tonnage {kind} .*$", page, re.MULTILINE)
    return shlex.split(line)[1:]


def program_of(name: str) -> str:
    """The program on a recipe's page."""
    (program,) = re.findall(r"```python\n(.*?)```", (RECIPES / f"{name}.md").read_text(), re.DOTALL)
    return str(program)


def run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["tonnage", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the recipes and rows."""
    (tmp_path / "recipes").symlink_to(RECIPES)
    monkeypatch.chdir(tmp_path)
    for path, number in {"rows.jsonl": 80, "alpaca_data.json": 200}.items():
        write_rows(tmp_path / path, alpaca_rows(number))
    for name in ("rows", "tasks"):
        (tmp_path / name).mkdir()
    for name, some in {"train": training_examples(0)[:300], "held-out": held_out_examples(2, 0)}.items():
        rows = [{"instruction": one.instruction, "output": one.answer} for one in some]
        write_rows(tmp_path / "tasks" / f"{name}.jsonl", rows)
    exec(program_of("dpo-135m-laptop"), {})
    shutil.copy(tmp_path / "tasks" / "held-out-pairs.jsonl", tmp_path / "pairs.jsonl")
    for split, number in {"train": 1000, "test": 20}.items():
        lines = [json.dumps({"content": f"{row['instruction']} {row['output']}"}) for row in alpaca_rows(number)]
        (tmp_path / "rows" / f"{split}.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_every_recipe_has_a_page() -> None:
    assert NAMES
    assert sorted(path.stem for path in RECIPES.glob("*.md") if path.stem != "README") == NAMES


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
def test_the_full_form_fits(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)  # pages say what holds for most processors
    words = command(name, "plan")
    model = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())["model"]
    words += [*ROWS.get(name, []), "data.cache=packs", "--json"]
    if name == SEES:
        exec(program_of(SEES), {})
    else:
        SHAPES[model].save_pretrained(folder / "full")
        byte_tokenizer().save_pretrained(folder / "full")
        # Pages speak of rows that are computed whole: how much real ones share is not known here.
        words += ["model=full", "init=random", "data.share_prefixes=false"]
    run(words, monkeypatch)
    said = capsys.readouterr().out
    (folder / "plan.json").write_text(said)
    plan = Plan.read(folder / "plan.json")
    assert plan.choice.peak_bytes <= plan.budget.usable
    page = (RECIPES / f"{name}.md").read_text()
    (gigabytes,) = re.findall(r"plans (\S+) GB a worker", page)
    assert plan.choice.peak_bytes / 1e9 == pytest.approx(float(gigabytes), rel=0.02)


@pytest.mark.matrix
def test_8b_fits_a_card_of_24_gb_whose_host_has_128(tmp_path: Path) -> None:
    shape: dict[str, Any] = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
    }
    LlamaConfig(
        **shape, num_attention_heads=32, num_key_value_heads=8, architectures=["LlamaForCausalLM"]
    ).save_pretrained(tmp_path)
    page = (RECIPES / "one-24gb-gpu.md").read_text()
    ((hardware, *said),) = re.findall(
        r"8B --hardware (\S+)` plans (\S+) GB of the GPU and (\S+) GB of\sthe host, (\S+) s for a step", page
    )
    choice = suppose(str(tmp_path), [], parse_hardware(hardware)).choice
    found = (choice.peak_bytes / 1e9, choice.host_bytes / 1e9, choice.seconds.total)
    assert found == pytest.approx(tuple(map(float, said)), rel=0.02)
    assert (choice.layout.moments, choice.layout.gradient_tier) == ("fp32", "host")


def test_the_slurm_recipe_is_a_script_that_bash_reads(folder: Path) -> None:
    config = read_config(RECIPES / "llama-2-70b.yaml", [], check_files=False)
    assert isinstance(config.launch, SlurmLaunch)
    script = batch_script(config.launch, RunDirectory(config.output))
    assert "#SBATCH --nodes=2\n" in script
    assert "#SBATCH --gres=gpu:8\n" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.matrix
@pytest.mark.privileged
@pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing())
def test_the_slurm_recipe_runs_as_a_job(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Its small form on a real Slurm, with the page's words for a job without GPUs; then with local workers."""
    write_model(folder / "small", llama_config(num_hidden_layers=1))
    small = [*command("llama-2-70b", "train"), "data.cache=packs", "launch.threads=1"]
    page = " ".join((RECIPES / "llama-2-70b.md").read_text().split())
    (as_a_job,) = re.findall(r"without GPUs: `([^`]*)` in place of `launch.with=local`", page)
    with slurm_cluster.Cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        program = [sys.executable, "-m", "tonnage"]
        words = [word for word in small if word != "launch.with=local"] + shlex.split(as_a_job)
        submitted = subprocess.run(
            [*program, *words], env=cluster.environment, capture_output=True, text=True, timeout=300, check=False
        )
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    job = RunDirectory("runs/llama-2-70b")
    assert len(numbers(job)) == Plan.read(job.plan).num_steps == 12
    assert [record["step"] for record in job.read_metrics() if "eval_loss" in record][:3] == [0, 5, 10]
    assert (job.export / "config.json").exists()
    assert "#SBATCH" in (job.path / "job.sh").read_text()
    done = subprocess.run([*program, *small, "output=local"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert numbers(job) == numbers(RunDirectory("local"))


def test_the_ray_recipe_is_a_job_for_kuberay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (RECIPES / "dolly-v2-3b.md").read_text()
    (line,) = re.findall(r"^    tonnage (launch kube .*)$", page, re.MULTILINE)
    write_model(folder / "small", neox_config(num_hidden_layers=1))
    run(shlex.split(line), monkeypatch)
    (path,) = (folder / "manifests").glob("*-rayjob.yaml")
    (job,) = [one for one in yaml.safe_load_all(path.read_text()) if one["kind"] == "RayJob"]
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert group["replicas"] == 1
    asked = container["resources"]["limits"]
    assert (int(asked["cpu"]), int(asked["nvidia.com/gpu"])) == (28, 1)


def numbers(run: RunDirectory) -> list[dict[str, Any]]:
    """What every step computed."""
    kept = ("step", "loss", "grad_norm", "lr", "tokens")
    return [{key: record[key] for key in kept} for record in run.read_metrics() if "loss" in record]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.matrix] if name in ELSEWHERE_TOO else []) for name in NAMES],
)
def test_the_small_form_runs_whole(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    words = [*command(name, "train"), "data.cache=packs", "launch.threads=1"]
    on_ray = full.get("launch", {}).get("with") == "ray"
    if on_ray:
        pytest.importorskip("ray")
    write_model(folder / "small", neox_config(num_hidden_layers=1) if on_ray else llama_config(num_hidden_layers=1))
    if name == SEES:
        exec(program_of(SEES), {})
    run(words, monkeypatch)
    directory = RunDirectory(full["output"])
    plan = Plan.read(directory.plan)
    assert len(numbers(directory)) == plan.num_steps
    written = "config.json" if full.get("adapter", "none") == "none" else "adapter_config.json"
    assert (directory.export / written).exists()
    memory = full.get("memory", {})
    assert plan.layout.zero == memory.get("zero", plan.layout.zero)
    assert plan.layout.moments == memory.get("moments", plan.layout.moments)
    if on_ray:  # on this machine: the bits of local workers, and Ray knows of the last checkpoint
        plain = [word for word in words if not word.startswith(("launch.gpus", "launch.cpus", "launch.hardware"))]
        run([*plain, "launch.with=local", "output=local"], monkeypatch)
        assert numbers(directory) == numbers(RunDirectory("local"))
        last = read_json(directory.path / "checkpoint_manager_snapshot.json")["latest_checkpoint_result"]
        assert last["checkpoint_dir_name"] == f"checkpoints/step-{plan.num_steps:08d}"
        assert last["metrics"]["loss"] == numbers(directory)[-1]["loss"]
        assert not directory.is_locked()


@pytest.mark.matrix
def test_a_model_learns_to_see_and_answers_the_same_in_plain_transformers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    exec(program_of(SEES), {})
    run(["train", f"recipes/{SEES}.yaml", "data.cache=packs"], monkeypatch)  # which its gate would have ended with 4
    export = Path("runs", "shapes", "export")
    model: Any = AutoModelForImageTextToText.from_pretrained(export).eval()
    processor = AutoProcessor.from_pretrained(export)
    right, rows = 0, [json.loads(line) for line in Path("shapes", "held-out.jsonl").read_text().splitlines()]
    for question, answer in (row["messages"] for row in rows):
        text = processor.apply_chat_template([question], add_generation_prompt=True)
        image = Image.open(Path("shapes") / question["content"][0]["path"])
        inputs = processor(text=text, images=image, return_tensors="pt")
        tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        right += processor.decode(tokens, skip_special_tokens=True) == answer["content"]
    assert right >= 0.9 * len(rows), right
