"""Which queues are in order, and what is reported about those that are not."""

import pytest

from polyreme_operator.queueing.quota import QuotaLedger
from polyreme_operator.queueing.tree import DEPTH_MAX, QueueReason, QueueTree
from polyreme_operator.types.queues import QueueView, Quota, StopPolicy
from tests.unit.operator.queue_scenes import GPU, gpus, queue


def test_a_queue_knows_its_way_to_the_root() -> None:
    tree = QueueTree.of([queue("a", 1, "mid"), queue("mid", parent="top"), queue("top"), queue("b")])
    assert not tree.problems
    assert (tree.path("a"), tree.root("a"), tree.children("top")) == (("a", "mid", "top"), "top", ("mid",))
    assert tree.children("") == ("b", "top")


@pytest.mark.parametrize(
    ("queues", "reason", "names", "words"),
    [
        ([queue("a", parent="b"), queue("b", parent="a")], "Cycle", {"a", "b"}, "a -> b -> a"),
        ([queue("a", parent="a")], "Cycle", {"a"}, "a -> a"),
        ([queue("c", parent="a"), queue("a", parent="a")], "Cycle", {"a", "c"}, "of c form a cycle: a -> a"),
        ([queue("a", parent="x"), queue("b", parent="a")], "ParentMissing", {"a", "b"}, "spec.parent of a is x"),
        ([queue("a", 1), queue("a", 2), queue("c", parent="a")], "Duplicate", {"a", "c"}, "2 queues are called a"),
        (
            [QueueView(name="a", quotas=(Quota(resource=GPU, nominal=1), Quota(resource=GPU, nominal=2)))],
            "Duplicate",
            {"a"},
            f"names {GPU} more than once",
        ),
    ],
)
def test_what_is_not_in_order_says_why(queues: list[QueueView], reason: str, names: set[str], words: str) -> None:
    tree = QueueTree.of([*queues, queue("good", 1)])
    assert tree.problems.keys() == names
    assert {problem.reason for problem in tree.problems.values()} == {QueueReason(reason)}
    assert any(words in problem.message for problem in tree.problems.values())
    assert tree.in_order("good")
    assert not any(tree.in_order(name) or tree.path(name) for name in names)


def test_depth_has_an_end() -> None:
    chain = [queue(f"q{at}", parent=f"q{at - 1}" if at else "") for at in range(DEPTH_MAX + 1)]
    tree = QueueTree.of(chain)
    assert tree.problems.keys() == {f"q{DEPTH_MAX}"}
    assert tree.problems[f"q{DEPTH_MAX}"].reason is QueueReason.TOO_DEEP


def test_only_the_default_queue_need_not_exist() -> None:
    tree = QueueTree.of([])
    ledger = QuotaLedger(tree, {("gone", GPU): 3})
    assert tree.in_order("default")
    assert ledger.room("default", GPU) is None
    assert ledger.fits("default", gpus(8), 1000)
    assert not tree.in_order("other")
    assert ledger.room("other", GPU) == 0
    assert not ledger.fits("other", (), 1)
    assert ledger.used("gone", GPU) == 3


def test_a_broken_default_queue_admits_nothing() -> None:
    tree = QueueTree.of([queue("default", parent="gone")])
    assert not tree.in_order("default")
    assert QuotaLedger(tree, {}).room("default", GPU) == 0


def test_the_strictest_stop_policy_above_a_queue_holds() -> None:
    top = queue("top", stop_policy=StopPolicy.HOLD_AND_DRAIN)
    tree = QueueTree.of([queue("a", parent="mid", stop_policy=StopPolicy.HOLD), queue("mid", parent="top"), top])
    assert tree.stop_policy("a") is StopPolicy.HOLD_AND_DRAIN
    assert QueueTree.of([queue("a", stop_policy=StopPolicy.HOLD)]).stop_policy("a") is StopPolicy.HOLD
    assert tree.stop_policy("default") is StopPolicy.NONE


def test_siblings_lend_and_borrow_within_their_limits() -> None:
    tree = QueueTree.of(
        [queue("a", 4, "top", lend=1), queue("b", 4, "top", borrow=3), queue("c", 4, "top"), queue("top", 2)]
    )
    ledger = QuotaLedger(tree, {})
    assert [ledger.room(name, GPU) for name in "abc"] == [14, 7, 11]
    ledger.charge("c", gpus(1), 11)
    assert [ledger.room(name, GPU) for name in "abc"] == [3, 0, 0]
    assert (ledger.borrowed("c", GPU), ledger.borrowed("a", GPU)) == (7, 0)
    assert not ledger.fits("a", gpus(2), 2)
    ledger.charge("a", gpus(3), 1)
    ledger.release("c", gpus(1), 5)
    assert [ledger.room(name, GPU) for name in "abc"] == [5, 5, 5]


def test_a_resource_that_no_ancestor_limits_is_unlimited() -> None:
    tree = QueueTree.of([queue("a", 4, "top"), queue("b", parent="top"), queue("top")])
    ledger = QuotaLedger(tree, {("b", GPU): 100})
    assert ledger.room("a", GPU) == 4
    assert ledger.room("a", "cpu") is None
    assert ledger.room("b", GPU) is None


def test_a_lowered_quota_leaves_no_room_but_what_is_kept() -> None:
    tree = QueueTree.of([queue("a", 4, "top", lend=0), queue("b", 2, "top"), queue("top")])
    ledger = QuotaLedger(tree, {("b", GPU): 5})
    assert (ledger.room("b", GPU), ledger.room("a", GPU)) == (0, 4)


def test_a_copy_tries_out_without_touching_the_books() -> None:
    ledger = QuotaLedger(QueueTree.of([queue("a", 4)]), {})
    twin = ledger.copy()
    twin.charge("a", gpus(4), 1)
    assert (twin.room("a", GPU), ledger.room("a", GPU)) == (0, 4)


def test_a_cohort_keeps_of_what_its_children_lend_too() -> None:
    tree = QueueTree.of(
        [queue("c", 4, "mid"), queue("mid", 0, "top", lend=1), queue("d", 0, "top"), queue("top", 0)],
    )
    ledger = QuotaLedger(tree, {})
    assert [ledger.room(name, GPU) for name in "cd"] == [4, 1]
    ledger.charge("d", gpus(1), 1)
    assert [ledger.room(name, GPU) for name in "cd"] == [3, 0]


def test_a_borrowing_limit_counts_from_the_quota_that_a_queue_keeps() -> None:
    tree = QueueTree.of([queue("a", 4, "top", lend=0, borrow=1), queue("b", 4, "top"), queue("top", 0)])
    ledger = QuotaLedger(tree, {})
    assert ledger.room("a", GPU) == 5
    ledger.charge("a", gpus(5), 1)
    assert [ledger.room(name, GPU) for name in "ab"] == [0, 3]
