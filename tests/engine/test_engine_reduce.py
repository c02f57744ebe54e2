"""The order in which a unit's reductions are launched."""

from __future__ import annotations

from types import SimpleNamespace

from megatron_fsdp_adapter.engine.reduce import largest_domain_first


def test_the_largest_domain_of_a_unit_is_reduced_first():
    """Equal sizes in the order of the parameters; the same on every rank."""

    def group(domain, numel):
        return SimpleNamespace(
            key=SimpleNamespace(domain=domain), layout=SimpleNamespace(total_numel=numel)
        )

    small, large, rest = group("one", 8), group("two", 9), group("one", 2)
    found = largest_domain_first([small, large, rest])
    assert found == [("one", [small, rest]), ("two", [large])]
    assert [name for name, _ in largest_domain_first([small, large])] == ["two", "one"]
    assert [name for name, _ in largest_domain_first([small, group("two", 8)])] == ["one", "two"]
