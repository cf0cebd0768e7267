"""Service is shared between tenants by what each was given, in virtual time."""

import itertools
import random

from verifier_service.fairness import MAX_REMEMBERED_TENANTS, TenantShares


def serve(shares: TenantShares, wants: dict[str, int], num_steps: int, rows_of_step: int) -> dict[str, int]:
    """Steps of `rows_of_step` single rows each; `wants` is how many sessions of a tenant want one in every step."""
    served = dict.fromkeys(wants, 0)
    for _ in range(num_steps):
        wanting = {tenant: [tenant] * count for tenant, count in wants.items()}
        for tenant in list(itertools.islice(shares.by_turns(wanting, lambda _: 1), rows_of_step)):
            served[tenant] += 1
            shares.charge(tenant, 1)
    return served


def test_a_tenant_with_a_hundred_sessions_takes_no_more_than_its_half_from_one_with_a_few():
    shares = TenantShares()
    for tenant in ("many", "few"):
        shares.join(tenant)
    served = serve(shares, {"many": 100, "few": 8}, num_steps=50, rows_of_step=10)
    assert abs(served["many"] - served["few"]) <= 10


def test_rows_that_a_tenant_does_not_want_go_to_the_others():
    shares = TenantShares()
    for tenant in ("many", "one"):
        shares.join(tenant)
    served = serve(shares, {"many": 100, "one": 1}, num_steps=50, rows_of_step=10)
    assert served == {"many": 450, "one": 50}


def test_idleness_saves_up_no_claim():
    shares = TenantShares()
    shares.join("busy")
    shares.charge("busy", 10_000)
    shares.join("newcomer")
    assert shares.served("newcomer") == shares.served("busy")
    served = serve(shares, {"busy": 20, "newcomer": 20}, num_steps=20, rows_of_step=10)
    assert abs(served["busy"] - served["newcomer"]) <= 10


def test_leaving_and_returning_pays_no_debt():
    shares = TenantShares()
    for tenant in ("greedy", "modest"):
        shares.join(tenant)
    shares.charge("greedy", 500)
    shares.leave("greedy")
    shares.join("greedy")
    assert shares.served("greedy") == 500


def test_who_comes_when_nobody_is_there_starts_where_the_last_one_left():
    shares = TenantShares()
    shares.join("first")
    shares.charge("first", 70)
    shares.leave("first")
    shares.join("second")
    assert shares.served("second") == 70


def test_turns_take_an_item_when_its_turn_comes_and_not_before():
    shares = TenantShares()
    for tenant in "ab":
        shares.join(tenant)
    taken: list[str] = []

    def lazily(names):
        for name in names:
            taken.append(name)
            yield name

    turns = shares.by_turns({"a": lazily(["a1", "a2"]), "b": lazily(["b1"])}, {"a1": 5, "a2": 1, "b1": 1}.__getitem__)
    assert next(turns) == "a1"
    assert taken == ["a1"]
    assert list(turns) == ["b1", "a2"]


def test_tenants_that_come_and_go_leave_nothing_behind_that_grows():
    shares = TenantShares()
    generator = random.Random(1)
    for index in range(3 * MAX_REMEMBERED_TENANTS):
        shares.join(f"t{index}")
        shares.charge(f"t{index}", generator.randrange(100))
        shares.leave(f"t{index}")
    assert shares.num_tenants == 0
    assert len(shares._absent) == MAX_REMEMBERED_TENANTS
