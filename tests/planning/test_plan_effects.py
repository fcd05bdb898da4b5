"""Fields of a plan that no column holds: what they do to the stack, and which are said to do nothing."""

from lightning_megascale.planning.plan_effects import not_modelled, stack_under
from lightning_megascale.planning.stacks import stack_for


def test_sums_in_bfloat16_and_two_hops_change_the_stack_and_nothing_else_does():
    stack = stack_for("h100")
    halved = stack_under(stack, {"reduce_dtype": "bfloat16"})
    assert (halved.precision.reduce_bytes, halved.precision.accumulate_bytes) == (2, 2)
    assert (stack.precision.reduce_bytes, stack.precision.accumulate_bytes) == (4, 4)
    assert stack_under(stack, {"expert_dispatcher": "two_hop_dedup"}).dispatch_hops == 2 and stack.dispatch_hops == 1
    assert stack_under(stack, {"reduce_dtype": "float32", "expert_dispatcher": "auto", "compile": True}) == stack


def test_what_changes_no_figure_is_named():
    assert not_modelled({"compile": True, "activation_offload": False, "attention_backend": "auto"}) == ("compile=True",)
    assert not_modelled({"activation_checkpointing": {int}}) == ("activation_checkpointing of chosen classes (counted as full)",)
    assert not_modelled({"context_parallel_method": "ring+ulysses"}) == ("context_parallel_method=ring+ulysses (counted as a ring)",)
