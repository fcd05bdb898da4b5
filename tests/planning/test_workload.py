"""FLOPs of a workload: exact against torch's counter on small real models, causal and packed pairs against a count by hand."""

import dataclasses
import json

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from transformers import AutoConfig

from lightning_megascale.models.decoder import Decoder
from lightning_megascale.models.presets import PRESETS
from lightning_megascale.planning.model_config import from_decoder_config, from_hf
from lightning_megascale.planning.shape import AttentionCore, Flops, Matmul, causal_pairs
from lightning_megascale.planning.workload import Workload
from tests.planning.families import CASES, VOCAB, model_of, shape_of

ROWS = 2


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def counted(run):
    """(forward, backward) by torch's counter; ``run`` returns what is differentiated."""
    with FlopCounterMode(display=False) as forward:
        out = run()
    with FlopCounterMode(display=False) as backward:
        out.float().sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def decoder_workload(config, length, **others):
    return Workload(from_decoder_config(dataclasses.asdict(config)), length, ROWS, **others)


@pytest.mark.parametrize(
    "config",
    [
        PRESETS["tiny"],
        dataclasses.replace(PRESETS["tiny"], num_kv_heads=2, head_dim=24, qk_norm=True, tie_embeddings=True),
        dataclasses.replace(PRESETS["tiny"], norm="layer", bias=True, mlp="gelu", positions="learned"),
        PRESETS["tiny_moe"],
    ],
    ids=["tiny", "grouped", "gpt", "moe"],
)
def test_a_step_of_our_decoder(config):
    """float64, in which experts are plain products. The counter counts all pairs of a row, and the row of zeros that stands in our experts
    for no expert."""
    length = 17
    torch.manual_seed(0)
    model = Decoder(config).double()
    ids = torch.randint(config.vocab_size, (ROWS, length))
    with sdpa_kernel(SDPBackend.MATH):
        forward, backward = counted(lambda: model(ids))
    workload = decoder_workload(config, length)
    flops = workload.flops_per_step(pairs="square")
    zeros = [matmul.flops(1).forward // matmul.per_token for kind in workload.model.layers for matmul in kind.matmuls if matmul.copies > 1]
    assert (flops.forward, flops.backward_inputs + flops.backward_weights) == (forward - sum(zeros), backward - 2 * sum(zeros))
    assert flops.total == forward + backward - 3 * sum(zeros)


def test_a_packed_row_is_its_documents_one_by_one():
    config, lengths = PRESETS["tiny"], (5, 11, 1, 15)
    torch.manual_seed(0)
    model = Decoder(config).double()
    total = 0
    with sdpa_kernel(SDPBackend.MATH):
        for length in lengths:
            total += sum(counted(lambda length=length: model(torch.randint(config.vocab_size, (ROWS, length)))))
    packed = decoder_workload(config, sum(lengths), document_lengths=lengths)
    assert packed.flops_per_step(pairs="square").total == total
    assert packed.flops_per_step().total < total < decoder_workload(config, sum(lengths)).flops_per_step(pairs="square").total


@pytest.mark.parametrize(
    "case",
    ["llama", "qwen3", "gemma", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v3", "deepseek_v2", "gpt2", "bert", "t5"],
)
def test_a_step_of_transformers(case, tmp_path):
    """Attention is written out, experts are looped over; the counter counts all pairs of a row."""
    torch.manual_seed(0)
    length, source = 24, 40
    model = model_of(case, "cpu").eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    ids = torch.randint(3, VOCAB, (ROWS, length))
    inputs = dict(input_ids=ids)
    if case == "t5":
        inputs = dict(input_ids=torch.randint(3, VOCAB, (ROWS, source)), decoder_input_ids=ids)
    forward, backward = counted(lambda: model(**inputs).logits)
    workload = Workload(shape_of(case, tmp_path), length, ROWS, source_length=source if case == "t5" else None)
    flops = workload.flops_per_step(pairs="square")
    assert (flops.forward, flops.backward_inputs + flops.backward_weights) == (forward, backward)


@pytest.mark.parametrize(("length", "window"), [(1, None), (13, None), (13, 1), (13, 5), (13, 13), (13, 40)])
def test_pairs_are_those_of_the_mask(length, window):
    positions = torch.arange(length)
    ahead = positions[:, None] - positions[None, :]
    mask = (ahead >= 0) & (ahead < (window or length))
    assert causal_pairs(length, window) == int(mask.sum())


@pytest.mark.parametrize(("heads", "groups", "query_dim", "value_dim", "window"), [(4, 4, 8, 8, None), (4, 2, 24, 12, 5)])
def test_a_core_counts_the_products_a_causal_row_needs(heads, groups, query_dim, value_dim, window):
    """Each query multiplied with the keys it sees and nothing else, forward and backward, in documents of 7 and 12 tokens."""
    core = AttentionCore("attention", heads, groups, query_dim, value_dim, window=window)
    measured = [0, 0]
    for length in (7, 12):
        q, k, v = (torch.randn(heads, length, dim, requires_grad=True) for dim in (query_dim, query_dim, value_dim))

        def attend(q=q, k=k, v=v, length=length):
            rows = []
            for query in range(length):
                keys = slice(max(0, query + 1 - (window or length)), query + 1)
                rows.append((q[:, query : query + 1] @ k[:, keys].transpose(1, 2)).softmax(-1) @ v[:, keys])
            return torch.cat(rows, dim=1)

        measured = [old + new for old, new in zip(measured, counted(attend))]
    flops = core.flops({"tokens": (7, 12)})
    assert [flops.forward, flops.backward_inputs + flops.backward_weights] == measured and flops.backward_weights == 0


def test_a_flash_kernel_makes_the_scores_again():
    """torch's own formulas of its flash kernel."""
    q, k, v = (3, 4, 20, 24), (3, 4, 20, 24), (3, 4, 20, 12)
    core = AttentionCore("attention", 4, 4, 24, 12, causal=False)
    flops = core.flops({"tokens": (20,)}, flash=True) * 3
    assert flops.forward == sdpa_flop_count(q, k, v)
    assert flops.backward_inputs == sdpa_backward_flop_count((3, 4, 20, 12), q, k, v)


def test_cross_attention_pairs_each_document_with_its_source():
    core = AttentionCore("cross_attention", 2, 2, 4, 4, causal=False, keys="source")
    assert core.flops({"tokens": (3, 5), "source": (7, 2)}).forward == (3 * 7 + 5 * 2) * 2 * 2 * (4 + 4)


def test_windows_are_counted_in_the_layers_that_have_one(tmp_path):
    """qwen2: the last two of three layers see 8 tokens; gpt-oss: the first and third; mistral: all see 16."""
    for case, windows in (("qwen2", [None, 8, 8]), ("gpt_oss", [8, None, 8]), ("mistral", [16] * 3), ("llama", [None] * 3)):
        shape = shape_of(case, tmp_path)
        assert [kind.cores[0].window for kind in shape.layers] == windows, case
        seen = sum(causal_pairs(40, window) for window in windows)
        attention = Workload(shape, 40, 1).flops_per_row().forward - sum(
            matmul.flops(40).forward for kind in shape.layers for matmul in kind.matmuls
        ) - 2 * 40 * 64 * VOCAB  # fmt: skip
        assert attention == 4 * seen * 4 * 16, case


@pytest.mark.parametrize("case", ["qwen2", "qwen2_moe", "gpt_oss"])
@pytest.mark.parametrize("written", [True, False])
def test_layers_with_a_window_are_those_of_transformers(case, written, tmp_path):
    """Also where the file leaves the list out, as published ones do."""
    kind, values = CASES[case]
    config = AutoConfig.for_model(kind, **{**values, "num_hidden_layers": 5, "mlp_only_layers": [], "use_sliding_window": True,
                                           "sliding_window": 8, "max_window_layers": 3})  # fmt: skip
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    if not written:
        del saved["layer_types"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    windows = [kind.cores[0].window for kind in from_hf(tmp_path).layers]
    assert windows == [8 if kind == "sliding_attention" else None for kind in config.layer_types] and len(set(windows)) == 2


def test_seed_case_by_its_published_formula():
    """Narayanan et al. 2021, equation 3 without recomputation: 72 B s l h^2 (1 + s / 6h + V / 12 l h) for 175B at 2,048 tokens."""
    workload = Workload(from_decoder_config(dataclasses.asdict(PRESETS["dense_175b"])), 2048, 1024)
    layers, hidden, vocab, length = 96, 12288, 51200, 2048
    formula = 72 * 1024 * length * layers * hidden**2 * (1 + length / (6 * hidden) + vocab / (12 * layers * hidden))
    assert workload.flops_per_step(pairs="square").total == pytest.approx(formula, rel=1e-12)
    assert workload.tokens_per_step == 2048 * 1024
    per_token = workload.flops_per_step(pairs="square").total / workload.tokens_per_step
    assert workload.flops_per_token(pairs="square") == pytest.approx(per_token, rel=1e-12)
    half = 72 * 1024 * length * layers * hidden**2 * ((length + 1) / (12 * hidden))  # causal: half of the pairs and half a token
    assert workload.flops_per_step().total == pytest.approx(formula - 72 * 1024 * length**2 * layers * hidden / 6 + half, rel=1e-12)


def test_the_parts_of_a_row_sum_to_it():
    workload = decoder_workload(PRESETS["tiny_moe"], 32)
    parts = [workload.layer_flops(kind) for kind in workload.model.layers]
    assert sum(parts, workload.head_flops()) == workload.flops_per_row()
    assert workload.flops_per_row() * ROWS == workload.flops_per_step()


def test_experts_cost_by_the_tokens_that_choose_them():
    matmul = Matmul("experts.down_proj", 10, 20, copies=8, per_token=3)
    assert (matmul.parameters, matmul.active_parameters, matmul.part) == (1600, 600, "experts")
    assert matmul.flops(7) == Flops(2 * 7 * 3 * 200, 2 * 7 * 3 * 200, 2 * 7 * 3 * 200)


@pytest.mark.parametrize(
    ("case", "values", "message"),
    [
        ("gpt2", dict(sequence_length=129), "sequence_length=129: must be at most 128, the rows of the model's learned positions"),
        ("llama", dict(global_batch_size=0), "global_batch_size=0: must be an integer of at least 1"),
        ("llama", dict(sequence_length=True), "sequence_length=True: must be an integer"),
        ("llama", dict(source_length=8), "source_length=8: must be left out, the model has no encoder beside its decoder"),
        ("t5", {}, "source_length=None: must be given, the model has an encoder"),
        ("t5", dict(source_length=8, document_lengths=(16, 16)), "document_lengths: must be left out with an encoder-decoder"),
        ("llama", dict(document_lengths=(16, 15)), r"document_lengths=\(16, 15\): must be positive integers that sum to"),
        ("llama", dict(document_lengths=(33, -1)), "must be positive integers that sum to sequence_length=32; count padding"),
    ],
)  # fmt: skip
def test_errors_name_the_value_and_the_rule(case, values, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        Workload(shape_of(case, tmp_path), **{"sequence_length": 32, "global_batch_size": 4, **values})
