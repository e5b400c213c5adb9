"""Entries of a precision map: parsed, resolved over all linears, and refused with the nearest valid one."""

import copy
import pickle
from pathlib import Path

import pytest

from megafp8.config import flags, precision_map, rules
from megafp8.config.precision_map import GemmChoice, LinearChoice, parse_entry, resolve
from megafp8.config.precision_schedule import SchedulePhase, is_quantized_at, parse_schedule, precision_at
from megafp8.config.schema import ModelConfig, PrecisionConfig
from megafp8.config.settings import from_json, to_json
from megafp8.errors import ConfigError

TENSORWISE, BLOCKWISE, HIGH = GemmChoice("tensorwise", "hybrid"), GemmChoice("blockwise", "e4m3"), GemmChoice()
BASE = {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "tensorwise"}
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "precision_map.yaml"
RUN = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 4 --lr 1e-3 --bf16 "
    "--train-iters 1000 --tokenizer-type NullTokenizer --vocab-size 255 --mock-data --position-embedding-type rope"
)


def resolved(*entries: str, num_layers: int = 24, **precision: object) -> dict[str, LinearChoice]:
    return resolve(ModelConfig(num_layers=num_layers), PrecisionConfig(**(BASE | precision), precision_map=entries))


def problems_of(text: str) -> list[str]:
    config = flags.parse(f"{RUN} {text}".split()).config
    return rules.setting_problems(config, 1)


# ---- entries ------------------------------------------------------------------------------------------------------


def test_an_entry_has_pattern_gemms_recipe_and_format() -> None:
    entry = parse_entry("layers.20-23.*:dgrad,wgrad=blockwise/e4m3")
    assert (entry.pattern, entry.gemms) == ("layers.20-23.*", ("dgrad", "wgrad"))
    assert (entry.recipe, entry.format) == ("blockwise", "e4m3")
    assert parse_entry("*.linear_fc2=nvfp4").gemms == precision_map.GEMMS


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("*.linear_fc2", "give PATTERN=RECIPE"),
        ("*.linear_fc2:dgard=bf16", "'dgard' is not a GEMM; the GEMMs are fprop, dgrad, wgrad; did you mean dgrad"),
        ("*.linear_fc2=blokwise", "did you mean blockwise"),
        ("*.linear_fc2=nvfp4/e4m3", "'e4m3' is not a format of nvfp4, which has e2m1"),
        ("*.linear_fc2=bf16/e4m3", "has a fixed format"),
        ("*:dgrad,dgrad=bf16", "dgrad is given twice"),
        ("*.linear_fc2:=bf16", "give PATTERN=RECIPE"),
    ],
)
def test_invalid_entries_are_reported(text: str, words: str) -> None:
    with pytest.raises(ValueError, match="^") as caught:
        parse_entry(text)
    assert words in str(caught.value)
    assert any(words in problem for problem in problems_of(f"--precision {text}"))


def test_format_comes_from_entry_then_run_then_default() -> None:
    def format_in(entry: str, **precision: object) -> object:
        return resolved(entry, **precision)["output_layer"].fprop.format

    assert format_in("output_layer=blockwise/e5m2") == "e5m2"
    assert format_in("output_layer=blockwise") == "hybrid"
    assert format_in("output_layer=blockwise", fp8_format=None) == "e4m3"
    assert format_in("output_layer=nvfp4") == "e2m1"


# ---- resolved -----------------------------------------------------------------------------------------------------


def test_the_map_of_the_documents() -> None:
    """First and last layers BF16, fc2 blockwise, output layer MXFP8, gradients of layers 20 to 22 in BF16."""
    chosen = resolved(
        "*.linear_fc2=blockwise/e4m3", "output_layer=mxfp8/e4m3", "layers.20-22.*:dgrad,wgrad=bf16",
        "layers.0.*=bf16", "layers.23.*=bf16",
    )  # fmt: skip
    assert len(chosen) == 24 * 4 + 1
    expected = {
        "layers.0.linear_fc2": (HIGH,) * 3,
        "layers.1.linear_fc1": (TENSORWISE,) * 3,
        "layers.1.linear_fc2": (BLOCKWISE,) * 3,
        "layers.19.linear_qkv": (TENSORWISE,) * 3,
        "layers.20.linear_qkv": (TENSORWISE, HIGH, HIGH),
        "layers.22.linear_fc2": (BLOCKWISE, HIGH, HIGH),
        "layers.23.linear_proj": (HIGH,) * 3,
        "output_layer": (GemmChoice("mxfp8", "e4m3"),) * 3,
    }
    assert {name: tuple(chosen[name]) for name in expected} == expected


def test_later_entries_win() -> None:
    one, other = "*.linear_fc1=blockwise/e4m3", "layers.3.*=tensorwise"
    assert resolved(one, other)["layers.3.linear_fc1"].fprop == TENSORWISE
    assert resolved(other, one)["layers.3.linear_fc1"].fprop == BLOCKWISE


def test_entries_win_over_first_and_last_layers_and_over_no_wgrad() -> None:
    chosen = resolved("layers.0.linear_fc1=tensorwise", first_last_layers_bf16=True, fp8_wgrad=False)
    assert tuple(chosen["layers.0.linear_fc1"]) == (TENSORWISE,) * 3
    assert tuple(chosen["layers.0.linear_fc2"]) == (HIGH,) * 3
    assert tuple(chosen["layers.1.linear_fc2"]) == (TENSORWISE, TENSORWISE, HIGH)


@pytest.mark.parametrize("recipe", ["nvfp4", "quartet2"])
def test_fp4_layers_at_both_ends_may_be_in_high_precision(recipe: str) -> None:
    chosen = resolved(
        fp8_format=None, fp4_format="e2m1", fp4_recipe=recipe, first_last_layers_bf16=True,
        num_layers_at_start_in_bf16=2, num_layers_at_end_in_bf16=8,
    )  # fmt: skip
    quantized = {int(name.split(".")[1]) for name, choice in chosen.items() if choice.is_quantized}
    assert quantized == set(range(2, 16))


def test_without_an_fp8_format_the_map_alone_quantizes() -> None:
    chosen = resolved("*.linear_qkv=mxfp8", fp8_format=None)
    quantized = {name for name, choice in chosen.items() if choice.is_quantized}
    assert quantized == {f"layers.{layer}.linear_qkv" for layer in range(24)}


def test_used_recipes_are_known_without_a_model() -> None:
    precision = PrecisionConfig(**BASE, precision_map=("*=bf16", "output_layer=mxfp8", "a=nvfp4", "b=mxfp8"))
    assert precision_map.used_recipes(precision) == ("tensorwise", "mxfp8", "nvfp4")
    assert precision_map.recipe_source(precision, "tensorwise") == "--fp8-recipe tensorwise"
    assert precision_map.recipe_source(precision, "mxfp8") == "--precision output_layer=mxfp8"


# ---- refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--precision *.linear_fc3=mxfp8", "did you mean *.linear_fc"),
        ("--precision output_layr=mxfp8", "did you mean output_layer"),
        ("--precision layers.2-7.*=mxfp8", "layers.2-7: the layers are 0 to 3"),
        ("--precision layers.3-2.*=mxfp8", "a range must be ascending; use layers.2-3"),
        ("--precision *=fp32", "the weights of this run are bf16; give bf16"),
        ("--precision output_layer:fprop=delayed/e4m3 output_layer:wgrad=delayed/hybrid", "e4m3 and hybrid"),
        ("--precision *.linear_fc1=mxfp8 --ffn-hidden-size 208", "*.linear_fc1=mxfp8 needs multiples of 32"),
        ("--fp8-margin 1 --precision *=tensorwise", "--fp8-margin 1 has no effect"),
        ("--fp8-schedule bf16:100,fp8", "fp8 in --fp8-schedule bf16:100,fp8 has no effect without --fp8-format"),
        ("--fp8-format hybrid --fp8-schedule fp8:1000,bf16", "the run ends at step 1000"),
        ("--fp8-format hybrid --fp8-schedule fp32:10,fp8", "the weights of this run are bf16"),
        ("--fp8-format hybrid --fp8-schedule bf16", "has no quantized phase"),
        ("--transformer-impl local --precision *=mxfp8", "do not quantize"),
        ("--tp-comm-overlap --precision *=mxfp8", "buffers support only one recipe"),
        ("--fp4-format e2m1 --fp4-recipe quartet2 --no-fp4-hadamard", "--fp4-recipe nvfp4, not of quartet2"),
        ("--fp4-format e2m1 --fp4-recipe quartet2 --ffn-hidden-size 192", "multiple"),
        ("--fp4-four-over-six", "--fp4-four-over-six has no effect without --fp4-format"),
    ],
)
def test_impossible_maps_are_refused(text: str, words: str) -> None:
    found = problems_of(text)
    assert any(words in problem for problem in found), found


def test_settings_of_a_mapped_recipe_are_accepted() -> None:
    assert problems_of("--fp8-margin 1 --precision *.linear_fc1=delayed") == []
    tensorwise = "--fp8-format hybrid --fp8-recipe tensorwise"
    assert problems_of(f"{tensorwise} --fp8-margin 1 --precision *.linear_fc1=delayed") == []
    assert problems_of("--no-fp4-hadamard --precision *.linear_fc1=nvfp4") == []


def test_other_linears_may_have_other_dimensions() -> None:
    """208 channels are no multiple of 32, and only linear_fc1 and linear_fc2 have them."""
    assert problems_of("--precision output_layer=mxfp8 *.linear_qkv=mxfp8 --ffn-hidden-size 208") == []


# ---- files --------------------------------------------------------------------------------------------------------


def parsed(text: str) -> tuple[str, ...]:
    return flags.parse(text.split()).config.precision.precision_map


def test_a_file_is_read_into_the_settings(tmp_path: Path) -> None:
    """So the record of the run has its content, even if the file changes."""
    path = tmp_path / "map.yaml"
    path.write_text('"*.linear_fc2": blockwise\nlayers.2-3.*: {dgrad: bf16, wgrad: bf16}\n')
    entries = ("*.linear_fc2=blockwise", "layers.2-3.*:dgrad=bf16", "layers.2-3.*:wgrad=bf16")
    assert parsed(f"--precision-map {path}") == entries
    config = flags.parse(f"--precision output_layer=mxfp8 --precision-map {path} --precision *=nvfp4".split()).config
    assert config.precision.precision_map == (*entries, "output_layer=mxfp8", "*=nvfp4")
    assert from_json(to_json(config)) == config
    assert flags.parse(flags.to_argv(config)).config == config
    (tmp_path / "run.json").write_text(to_json(config))
    again = parsed(f"--config {tmp_path / 'run.json'} --precision a=bf16")
    assert again == (*config.precision.precision_map, "a=bf16")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("- a\n- b\n", ":1: the file must map patterns to recipes"),
        ("", "the file must map patterns to recipes"),
        ("a: bf16\nb: mxfp8\na: nvfp4\n", ":3: a is given twice"),
        ("a: {dgrad: bf16, wgrad: bf16, dgrad: mxfp8}\n", ":1: dgrad is given twice"),
        ("a:\n  dgrad: bf16\n  dgrad,wgrad: mxfp8\n", ":3: a: 'dgrad' and 'dgrad,wgrad' both set dgrad"),
        ("a: {'fprop,wgrad': bf16, 'dgrad,wgrad': mxfp8}\n", "'fprop,wgrad' and 'dgrad,wgrad' both set wgrad"),
        ("a: bf16\nb: {}\n", ":2: b is empty"),
        ("{}\n", ":1: the file is empty"),
        ("a: [bf16]\n", ":1: a must map patterns to recipes"),
        ("a: {dgrad: [bf16]}\n", ":1: a, dgrad: expected the name of a recipe"),
        ("a: bf16\n*.linear_fc2: blockwise\n", ":2: not YAML: '*.linear_fc2: blockwise': "),
        ("*.linear_fc2: blockwise\n", "starts with * needs quotes, as in '*.linear_fc2': bf16"),
        ("a: [bf16\n", ":2: not YAML: "),
    ],
)
def test_an_invalid_map_file_is_refused(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "map.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        parsed(f"--precision-map {path}")
    assert words in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "run", "words"),
    [
        ('"*.linear_fc1": bf16\n"*.linear_fc2": fp7\n', "", ":2: *.linear_fc2=fp7: 'fp7' is not a recipe"),
        ("layers.0.*:\n  dgrad: bf16\n  wgrdd: bf16\n", "", ":3: layers.0.*:wgrdd=bf16: 'wgrdd' is not a GEMM"),
        ('"*.fc2": mxfp8\n', "", ":1: *.fc2=mxfp8: *.fc2 matches no linear layer"),
        ("output_layer: fp32\n", "", ":1: output_layer=fp32: the weights of this run are bf16"),
        ("output_layer: mxfp8\n", "--transformer-impl local", ":1: output_layer=mxfp8 with --transformer-impl"),
    ],
)
def test_errors_in_a_map_file_have_its_line(content: str, run: str, words: str, tmp_path: Path) -> None:
    """The same text was given on the command line before, and was reported under `--precision`."""
    path = tmp_path / "map.yaml"
    path.write_text(content)
    texts = parsed(f"--precision-map {path}")
    assert any("--precision " in problem for problem in problems_of(f"{run} --precision {' '.join(texts)}"))
    found = problems_of(f"{run} --precision-map {path}")
    assert any(problem.startswith(f"--precision-map {path}{words}") for problem in found), found
    assert not any("--precision " in problem for problem in found)


def test_settings_excluded_by_a_map_name_the_map(tmp_path: Path) -> None:
    path = tmp_path / "map.yaml"
    path.write_text("output_layer: mxfp8\n")
    found = problems_of(f"--tp-comm-overlap --precision-map {path}")
    assert any(problem.startswith("--tp-comm-overlap with a precision map: ") for problem in found), found


def test_a_file_entry_can_be_passed_to_other_processes(tmp_path: Path) -> None:
    path = tmp_path / "map.yaml"
    path.write_text("output_layer: mxfp8\n")
    config = flags.parse(["--precision-map", str(path)]).config
    for copied in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        said = precision_map.recipe_source(copied.precision, "mxfp8")
        assert said == f"--precision-map {path}:1: output_layer=mxfp8"


def test_a_missing_file_is_an_error() -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        parsed("--precision-map /nowhere/map.yaml")


def test_the_example_is_a_map_for_the_model_that_it_names() -> None:
    found = problems_of(f"--fp8-format hybrid --fp8-recipe tensorwise --precision-map {EXAMPLE} --num-layers 32")
    assert found == []


# ---- by step ------------------------------------------------------------------------------------------------------


def test_a_precision_schedule_has_entries() -> None:
    assert parse_schedule("bf16:100,fp8:900,bf16") == (
        SchedulePhase("bf16", 100),
        SchedulePhase("fp8", 900),
        SchedulePhase("bf16", None),
    )
    precision = PrecisionConfig(fp8_schedule="bf16:100,fp8:900,bf16")
    quantized = [step for step in range(1, 2000) if is_quantized_at(precision, step)]
    assert quantized == list(range(101, 901))
    assert is_quantized_at(PrecisionConfig(), 1)


def test_a_phase_adds_entries_to_the_map() -> None:
    schedule = "bf16:2,fp8:4,fp8[*:dgrad,wgrad=bf16; layers.0.*=mxfp8]:6,fp8"
    precision = PrecisionConfig(fp8_format="hybrid", precision_map=("*.linear_fc2=bf16",), fp8_schedule=schedule)
    assert parse_schedule(schedule)[2] == SchedulePhase("fp8", 6, ("*:dgrad,wgrad=bf16", "layers.0.*=mxfp8"))
    maps = [precision_at(precision, step).precision_map for step in (2, 4, 5, 7)]
    assert maps == [(), *[precision.precision_map] * 3][:2] + [(*precision.precision_map, "*:dgrad,wgrad=bf16",
                    "layers.0.*=mxfp8"), precision.precision_map]  # fmt: skip
    assert precision_at(precision, 2).fp8_format is None and precision_at(precision, 5).fp8_format == "hybrid"
    assert all(precision_at(precision, step).fp8_schedule is None for step in (2, 4, 5, 7))
    assert precision_at(PrecisionConfig(), 1) == PrecisionConfig()


@pytest.mark.parametrize(
    ("flags", "schedule", "words"),
    [
        ("", "fp8:4,fp8[*.fc3=bf16]", "--fp8-schedule: *.fc3=bf16: *.fc3 matches no linear layer"),
        ("", "fp8:4,fp8[*.linear_fc2=int8]", "--fp8-schedule: *.linear_fc2=int8: 'int8' is not a recipe"),
        ("", "fp8:4,fp8[*.linear_fc2=fp32]", "--fp8-schedule: *.linear_fc2=fp32: the weights of this run are bf16"),
        ("", "fp8:4,fp8[*=bf16]", "--fp8-schedule fp8[*=bf16] leaves nothing quantized: give bf16"),
        ("", "fp8:4,fp8[*.linear_fc2=delayed]", "gives layers.0.linear_fc2 delayed hybrid, whose state"),
        ("", "fp8:4,fp8[*.linear_fc2:wgrad=nvfp4]", "gives layers.0.linear_fc2 nvfp4, whose state"),
        ("", "fp8:4,fp8[layers.1.*=tensorwise]", "fp8[layers.1.*=tensorwise] computes as fp8, the phase before it"),
        (
            "--hidden-size 80",
            "fp8:4,fp8[layers.*=mxfp8/e4m3]",
            "--fp8-schedule: layers.*=mxfp8/e4m3 needs multiples of 32",
        ),
        ("", "fp4:4,fp8[layers.0.*=nvfp4]", "fp4 in --fp8-schedule fp4:4,fp8[layers.0.*=nvfp4]"),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap",
            "fp8:4,fp8[layers.1.*=bf16]",
            "--tp-comm-overlap with a precision map",
        ),
        ("--precision layers.0.*=bf16", "fp8:4,fp8[*=mxfp8]", "fp8[*=mxfp8] quantizes layers.0.linear_qkv, which is"),
        ("--precision *=delayed/e4m3", "fp8:4,fp8[*=delayed/hybrid]", "gives layers.0.linear_qkv delayed hybrid"),
        ("--fp8-guard smooth-swiglu", "fp8:4,fp8[*:fprop=bf16]", "with entries in --fp8-schedule: scales per channel"),
    ],
)
def test_entries_that_a_phase_cannot_have(flags: str, schedule: str, words: str) -> None:
    found = problems_of(f"--fp8-format hybrid --fp8-recipe tensorwise --bf16 {flags} --fp8-schedule {schedule}")
    assert [problem for problem in found if words in problem], found


def test_recipes_and_changed_linears_count_those_of_phases() -> None:
    schedule = "fp8:4,fp8[layers.1.linear_fc2=mxfp8/e4m3]"
    text = f"{RUN} --fp8-format hybrid --fp8-recipe tensorwise --fp8-schedule {schedule}"
    config = flags.parse(text.split()).config
    assert precision_map.used_recipes(config.precision) == ("tensorwise", "mxfp8")
    assert precision_map.recipe_source(config.precision, "mxfp8").startswith("--fp8-schedule: layers.1.linear_fc2")
    assert precision_map.changed_linears(config.model, config.precision) == ("layers.1.linear_fc2",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bf16:100,fp8:900", "'fp8:900': the last phase lasts to the end of the run and takes no step: give fp8"),
        ("bf16,fp8", "every phase except the last"),
        ("bf16:100,fp8:100,bf16", "must increase"),
        ("bf16:0,fp8", "must increase"),
        ("bf16:10,bf16", "must differ from the one before it"),
        ("fp8[*:fprop=bf16]:10,fp8[*:fprop=bf16]", "must differ from the one before it"),
        ("fp8:10,bf16[*:fprop=bf16]", "brackets have the entries of a precision map in a phase of fp8 or fp4"),
        ("fp8:10,fp8[]", "brackets have the entries"),
        ("fp8:10,fp8[*:fprop=bf16", "give PRECISION:LAST_STEP, or"),
        ("fp8:10,fp8[layers.[01].*=bf16]", "a range of layers is layers.0-3"),
        ("fp8[*:fprop=bf16]x:10,fp8", "give PRECISION:LAST_STEP, or"),
        ("int8", "'int8' is not one of"),
        ("bf16:ten,fp8", "integer"),
    ],
)
def test_invalid_schedules_are_reported(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_schedule(text)
    assert any(words in problem for problem in problems_of(f"--fp8-format hybrid --fp8-schedule {text}"))
