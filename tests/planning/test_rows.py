"""Measured runs from a CSV: what a full row says, what an empty one is taken for, and where an error stands."""

import csv

import pytest

from lightning_megascale.planning.candidates import CHECKPOINTING, METHODS, SHARDING
from lightning_megascale.planning.rows import COLUMNS, read_row_file, read_rows, read_rows_and_reasons, write_predictions
from lightning_megascale.support import SCHEDULES
from tests.planning.published import FOLDER, published

# torchtitan benchmarks/llama3_h100_202412_torchtitan.md, table 6
TITAN = dict(
    row_id="torchtitan:17", model="Llama-3.1-405B", layers=126, hidden=16384, heads=128, kv_heads=8, ffn_hidden=53248, vocab=128256,
    seq_len=131072, gated_ffn=1, attention="gqa", gpus=512, gpu_type="H100-96GB-HBM2e-500W", gpus_per_node=8, global_batch=16,
    micro_batch=8, tp=8, pp=8, vpp=1, cp=4, ep=1, dp=2, zero="fsdp2", fsdp_group=8, recompute="full", sequence_parallel=1,
    precision="fp8", tokens_per_s_per_gpu=31, memory_gb=77.1, memory_unit="GiB", notes="4D 1F1B AsyncTP",
)  # fmt: skip


def write(path, *rows, columns=None):
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, columns or list(dict.fromkeys(key for row in rows for key in row)), restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


def read(tmp_path, **row):
    (found,) = read_rows(write(tmp_path / "rows.csv", row))
    return found


def test_a_full_row_is_the_run_it_describes(tmp_path):
    row = read(tmp_path, **TITAN)
    plan = {name: column[0].item() for name, column in row.candidates.columns().items()}
    assert plan == {
        "pp": 8, "dp_replicate": 1, "dp_shard": 2, "cp": 4, "tp": 8, "ep": 1, "microbatch_size": 1, "stages_per_rank": 1,
        "schedule": SCHEDULES.index("1F1B"), "checkpointing": CHECKPOINTING.index("full"), "sharding": SHARDING.index("gradients"),
        "sequence_parallel": True, "method": METHODS.index("allgather"), "reduce_every": False,
    }  # fmt: skip
    assert row.seconds == pytest.approx(16 * 131072 / 512 / 31)
    assert row.memory_bytes == 77.1 * 2**30
    assert row.oom is None
    assert row.workload.model.parameters == pytest.approx(405.85e9, rel=1e-4)
    assert (row.workload.sequence_length, row.workload.global_batch_size) == (131072, 16)
    assert (row.cluster.gpu.name, row.cluster.num_gpus) == ("h100_96gb", 512)
    assert (row.stack_name, row.dataset) == ("torchtitan", "torchtitan")
    assert row.stack.overlap_tensor
    assert (row.stack.precision.matmul_dtype, row.stack.precision.gather_bytes) == ("float8", 1)


def test_a_name_stands_for_an_architecture_and_everything_else_for_its_default(tmp_path):
    row = read(tmp_path, row_id="mine:1", model="DeepSeek-V3")
    assert row.workload.model.parameters == 671_026_404_352
    assert row.candidates.world_size[0] == 1
    assert (row.workload.sequence_length, row.workload.global_batch_size) == (2048, 1)
    assert (row.cluster.gpu.name, row.stack_name) == ("h100", "megascale")
    assert (row.seconds, row.memory_bytes, row.oom) == (None, None, None)
    said = " ".join(row.assumed)
    for column in ("tp=1", "pp=1", "cp=1", "dp=1", "seq_len=2048", "gpu_type=h100", "recompute=none", "zero=3", "micro_batch=1", "layers"):
        assert column in said


def test_columns_go_before_the_name(tmp_path):
    row = read(tmp_path, row_id="a:1", model="deepseekv3-L4", layers=4, first_dense_layers=1)
    assert [kind.name for kind in row.workload.model.layers] == ["dense", "moe", "moe", "moe"]


def test_a_model_of_columns_alone_is_gpt_or_llama(tmp_path):
    gpt = read(tmp_path, row_id="megatron_sc21_a100:1", model="GPT-1.7B", layers=24, hidden=2304, heads=24, vocab=51200)
    assert gpt.workload.model.parameters == 24 * (12 * 2304**2 + 13 * 2304) + (51200 + 2048) * 2304 + 2 * 2304
    # NVIDIA/Megatron-LM examples/sc21/run_table_1.sh
    assert (gpt.candidates.microbatch_size[0], gpt.candidates.stages_per_rank[0]) == (16, 1)
    llama = read(tmp_path, row_id="a:1", layers=2, hidden=64, heads=4, kv_heads=2, ffn_hidden=96, vocab=100, gated_ffn=1)
    assert llama.workload.model.parameters == 2 * (64 * 64 * 3 + 3 * 64 * 96 + 2 * 64) + 2 * 100 * 64 + 64


@pytest.mark.parametrize(
    "zero,wanted",
    [
        ("0", ("none", 8, 1)),
        ("1", ("optimizer", 1, 8)),
        ("2", ("gradients", 1, 8)),
        ("3", ("parameters", 1, 8)),
        ("fsdp2", ("parameters", 1, 8)),
    ],
)
def test_zero_says_what_is_shared_out(tmp_path, zero, wanted):
    row = read(tmp_path, row_id="a:1", model="Llama-3-8B", dp=8, zero=zero)
    plan = row.candidates
    assert (SHARDING[plan.sharding[0]], plan.dp_replicate[0], plan.dp_shard[0]) == wanted


def test_a_group_smaller_than_dp_is_hybrid(tmp_path):
    plan = read(tmp_path, row_id="a:1", model="Llama-3-8B", dp=32, zero=3, fsdp_group=8).candidates
    assert (plan.dp_replicate[0], plan.dp_shard[0]) == (4, 8)


def test_stages_of_a_rank_make_an_interleaved_schedule(tmp_path):
    plan = read(tmp_path, row_id="a:1", model="Llama-3-8B", pp=4, vpp=2, global_batch=8).candidates
    assert (SCHEDULES[plan.schedule[0]], plan.stages_per_rank[0]) == ("Interleaved1F1B", 2)


def test_plain_replicas_are_grouped_so_that_experts_find_ranks(tmp_path):
    plan = read(tmp_path, row_id="a:1", model="Qwen3-30B-A3B", dp=16, ep=8, zero=0).candidates
    assert (plan.dp_replicate[0], plan.dp_shard[0], plan.expert_shard[0]) == (2, 8, 1)


@pytest.mark.parametrize(
    "row,why",
    [
        (dict(model="Nemotron", attention="hybrid mamba"), "mamba"),
        (dict(model="Nobody-9B"), "'Nobody-9B' is not known"),
        (dict(model="Llama-3-8B", gpu_type="TPU"), "gpu_type='TPU'"),
        (dict(model="Llama-3-8B", gpus=16, tp=3), "gpus=16"),
        (dict(model="Llama-3-8B", dp=2, global_batch=3), "global_batch=3"),
        (dict(model="Llama-3-8B", gpus=12), "gpus_per_node=8"),
        (dict(model="Qwen3-30B-A3B", dp=2, ep=3), "ep=3"),
    ],
)
def test_what_cannot_be_predicted_has_a_reason(tmp_path, row, why):
    rows, reasons = read_rows_and_reasons(write(tmp_path / "rows.csv", dict(row_id="a:1", **row), dict(row_id="a:2", model="Llama-3-8B")))
    assert [found.row_id for found in rows] == ["a:2"]
    assert why in reasons["a:1"]


@pytest.mark.parametrize(
    "column,value",
    [("layers", "many"), ("tp", "0"), ("pp", "1.5"), ("oom", "maybe"), ("memory_unit", "MB"), ("zero", "7"), ("iteration_time_s", "nan"),
     ("dp", "-2"), ("iteration_time_s", "inf"), ("iteration_time_s", "0"), ("tokens_per_s_per_gpu", "0.0"), ("memory_gb", "0"),
     ("memory_gb", "-1"), ("params_b", "0"), ("zero", "3.5")],
)  # fmt: skip
def test_a_wrong_cell_is_named_with_its_line_and_column(tmp_path, column, value):
    path = write(tmp_path / "rows.csv", dict(row_id="a:1", model="Llama-3-8B"), {"row_id": "a:2", "model": "Llama-3-8B", column: value})
    with pytest.raises(ValueError, match=rf"rows\.csv, line 3, column {column}: '{value.lower() if column == 'memory_unit' else value}'"):
        read_rows(path)


@pytest.mark.parametrize("second,found", [("a:1", "'a:1' stands on line 2 too"), ("", "is empty")])
def test_every_row_needs_an_id_of_its_own(tmp_path, second, found):
    with pytest.raises(ValueError, match=rf"line 3, column row_id: {found}"):
        read_rows(write(tmp_path / "rows.csv", dict(row_id="a:1"), dict(row_id=second, model="x")))


@pytest.mark.parametrize("column", ["iteration_time_s", "tokens_per_s_per_gpu", "memory_gb"])
@pytest.mark.parametrize("value", ["0", "-3"])
def test_a_measurement_is_above_zero(tmp_path, column, value):
    with pytest.raises(ValueError, match=f"column {column}: '{value}' must be a number above 0"):
        read(tmp_path, **{"row_id": "a:1", "model": "Llama-3-8B", column: value})


@pytest.mark.parametrize(
    "text,message",
    [
        ("source,model\nx,Llama-3-8B\n", "rows.csv: the header has no column row_id; add it"),
        ("row id,model\na:1,Llama-3-8B\n", "the header has no column row_id; is 'row id' that column"),
        ("", "the header has no column row_id"),
        ("row_id,model,tp,model\na:1,x,1,y\n", "the header names the column model 2 times"),
        ("row_id,tp,tp \na:1,1,2\n", "the header names the column tp 2 times"),
        ('row_id,notes\na:1,"two\nlines"\na:2,one, two\n', "rows.csv, line 4: has 3 cells, and the header names 2 columns"),
    ],
)
def test_a_header_and_lines_that_do_not_fit_are_refused(tmp_path, text, message):
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_rows(path)


def test_a_published_table_of_another_kind_is_told_from_one_with_an_empty_id():
    with pytest.raises(ValueError, match="korthikanti2022_memory.csv: the header has no column row_id"):
        read_rows(published("korthikanti2022_memory.csv"))


def test_spaces_in_the_header_short_lines_and_blank_ones_are_read(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("row_id, model, tp, memory_gb,,\na:1, Llama-3-8B, 2\n\n")
    found = read_row_file(path)
    assert (found.rows[0].candidates.tp[0], found.rows[0].memory_bytes, found.misspelt) == (2, None, {})


@pytest.mark.parametrize(
    "name,wanted",
    [("hiden", "hidden"), ("Hidden", "hidden"), ("seqlen", "seq_len"), ("global_batch_size", "global_batch"), ("cluster_name", None),
     ("source_ref", None), ("iteration_time_derived", None), ("models", None)],
)  # fmt: skip
def test_a_name_close_to_a_column_that_is_lacking_is_told(tmp_path, name, wanted):
    path = write(tmp_path / "rows.csv", {"row_id": "a:1", "model": "Llama-3-8B", name: "x"})
    assert read_row_file(path).misspelt == ({} if wanted is None else {name: wanted})


@pytest.mark.parametrize("given,note", [("70", True), ("8.9", True), ("7.2", True), ("8.8", False), ("7.3", False), ("", False)])
def test_a_parameter_count_far_from_the_shapes_is_noted(tmp_path, given, note):
    said = [text for text in read(tmp_path, row_id="a:1", model="Llama-3-8B", params_b=given).assumed if "params_b" in text]
    assert said == ([f"params_b={given} and the shape makes 8.03: the shape is taken"] if note else [])


@pytest.mark.parametrize("two", ["2", "2.0", "2e0", "+2."])
def test_a_whole_number_may_be_written_as_another_kind(tmp_path, two):
    shape = dict(layers="4.0", hidden="1.024e3", heads="1e1", experts="0.0", ffn_hidden="4e3")
    with pytest.raises(ValueError, match="column hidden: '1024.5' must be a whole number of at least 1"):
        read(tmp_path, row_id="a:1", **{**shape, "hidden": "1024.5"})
    row = read(tmp_path, row_id="a:1", **{**shape, "heads": "1.6e1"}, tp=two, dp="4.0", zero="2.0", global_batch="1e3")
    assert (len(row.workload.model.layers), row.workload.model.hidden_size, row.workload.global_batch_size) == (4, 1024, 1000)
    assert (row.candidates.tp[0], SHARDING[row.candidates.sharding[0]]) == (2, "gradients")


def test_a_file_that_is_missing_says_what_it_should_hold(tmp_path):
    with pytest.raises(ValueError, match="there is no such file"):
        read_rows(tmp_path / "none.csv")


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ValueError, match="guess.csv: cannot be written: No such file or directory"):
        write_predictions(tmp_path / "none" / "guess.csv", [])


def test_predictions_are_written_where_there_are_any(tmp_path):
    path = tmp_path / "out.csv"
    write_predictions(path, [{"row_id": "a:1", "seconds": 1.5, "memory_bytes": 3 * 2**30, "oom": False}, {"row_id": "a:2"}])
    assert path.read_text() == "row_id,predicted_seconds,predicted_memory_gb,predicted_oom\na:1,1.5,3,0\na:2,,,\n"


def test_all_published_rows_load_or_have_a_reason():
    files = [file for file in sorted(FOLDER.glob("*.csv")) if "row_id" in file.open().readline().split(",")]
    if not files:
        pytest.skip("no published runs are here")
    for file in files:
        rows, reasons = read_rows_and_reasons(file)
        assert not read_row_file(file).misspelt
        assert not [text for row in rows for text in row.assumed if text.startswith("params_b=")]  # all within 3% of their shapes
        with file.open() as stream:
            assert len(rows) + len(reasons) == sum(1 for _ in csv.DictReader(stream))
        assert all("mamba" in reason or "V4" in reason for reason in reasons.values())
    assert set(COLUMNS) <= set(files[0].open().readline().strip().split(","))
