"""The fault table: complete against the lists that it cites, and strict about its form."""

from __future__ import annotations

import pytest

from polyreme_api.faults.table import FaultRow, fault_table, parse_table

CATALOG = {
    "": (162, 163, 164, 165, 166, 167, 168, 169, 170, 171, 172),
    "CHECK_MECHANICALS": (54,),
    "CHECK_UVM": (159,),
    "CONTACT_SUPPORT": (142,),
    "IGNORE": (37, 38, 43, 44, 63, 66, 67, 92, 93, 106, 107, 121, 137, 141, 152, 153, 157, 160, 161),
    "RESET_GPU": (46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158),
    "RESTART_APP": (
        8,
        11,
        13,
        25,
        31,
        32,
        39,
        40,
        41,
        60,
        68,
        69,
        70,
        71,
        72,
        75,
        76,
        77,
        80,
        82,
        83,
        84,
        85,
        86,
        88,
        89,
        94,
        96,
        97,
        98,
        99,
        100,
        101,
        102,
        103,
        104,
        105,
        126,
        127,
        128,
        129,
        130,
        131,
        132,
        133,
        134,
        135,
        139,
    ),
    "RESTART_BM": (79,),
    "RESTART_VM": (151,),
    "UPDATE_SWFW": (78,),
    "WORKFLOW_NVLINK5_ERR": (144, 145, 146, 147, 148, 149, 150),
    "WORKFLOW_NVLINK_ERR": (74,),
    "WORKFLOW_XID_45": (45,),
    "WORKFLOW_XID_48": (48,),
    "XID_154": (154,),
}
"""NVIDIA's XID catalog (Xid-Catalog.xlsx): codes by immediate action."""
FATAL_AT_EKS = (46, 48, 54, 62, 63, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 142, 143, 151, 155, 156, 158)
"""WellKnownXidCodes of EKS' node monitoring agent."""
MEANT = {
    "IGNORE": {"None", "Watch"},
    "RESTART_APP": {"RestartApplication"},
    "RESET_GPU": {"Reset", "Replace"},
    "RESTART_BM": {"Reboot"},
    "RESTART_VM": {"Reboot"},
    "CONTACT_SUPPORT": {"Support"},
}
"""Our actions for the catalog's that need no workflow."""
HEADER = "code,class,action,count,window_s,sticky_s,fatal,condition,source,meaning"
LINE = "Xid79,gpu-lost,Reboot,1,0,10800,yes,no,N+E,GPU has fallen off the bus"


def row(xid: int) -> FaultRow:
    return fault_table()[f"Xid{xid}"]


def test_every_xid_of_the_catalog_has_a_row_whose_action_is_the_catalogs() -> None:
    for action, xids in CATALOG.items():
        for xid in xids:
            assert "N" in row(xid).sources
            assert row(xid).action in MEANT.get(action, {row(xid).action}), xid


def test_every_xid_that_eks_calls_fatal_says_so_and_only_those_that_nvidia_ignores_are_not_fatal_here() -> None:
    named = {code for code, each in fault_table().items() if "E" in each.sources and code.startswith("Xid")}
    assert named == {f"Xid{xid}" for xid in FATAL_AT_EKS}
    assert [xid for xid in FATAL_AT_EKS if not row(xid).fatal] == [63]


def test_what_node_problem_detector_writes_has_rows() -> None:
    detectors = {each.code for each in fault_table().values() if each.is_condition}
    assert {"KernelDeadlock", "ReadonlyFilesystem", "FrequentKubeletRestart", "NTPProblem"} <= detectors
    assert not any(code.startswith("Xid") for code in detectors)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (LINE.replace("Reboot", "Burn"), "line 2 has action 'Burn', expected one of None, Watch"),
        (LINE.replace("gpu-lost", "gpu"), "line 2 has class 'gpu', expected one of gpu-lost"),
        (LINE.replace("10800", "long"), "line 2 has sticky_s 'long', expected a whole number"),
        (LINE.replace(",1,", ",3,"), "line 2 has window_s '0', expected a window where count is above 1"),
        (LINE.replace("N+E", "N+X"), "line 2 has source 'N+X'"),
        (LINE.replace("Xid79", "xid 79"), "line 2 has code 'xid 79', expected CamelCase"),
        (LINE + ",more", "line 2 has 11 cells, expected 10"),
        (LINE + "\n" + LINE, "line 3 has the code Xid79, which an earlier line has"),
    ],
)
def test_a_wrong_line_is_refused_with_its_number(line: str, sentence: str) -> None:
    with pytest.raises(ValueError, match="fault table") as caught:
        parse_table(f"{HEADER}\n{line}\n")
    assert sentence in str(caught.value)


def test_other_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="line 1 must be code,class,action"):
        parse_table("code,action\n")
