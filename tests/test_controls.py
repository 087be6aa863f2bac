"""Faults put in on purpose: each changes what it says and nothing else."""

import tiny
import torch

from eaglet import audit, controls
from eaglet.commands.controls import audited
from eaglet.params import AuditParams
from eaglet.ttt import Document

LAYERS = [0, 2, 5]
BOUNDS = AuditParams(0.95, 0.5, 1, max_relative_error=0.05, min_neighbour_ratio=3)


def truths() -> list[audit.Reference]:
    model = tiny.model()
    return [audit.reference(model, row) for row in tiny.rows(4, 24)[1:3]]


def test_the_values_of_each_fault() -> None:
    row, other = truths()
    outputs, last = row.outputs, len(row.final) - 1
    count = torch.arange(len(row.final)) % len(other.final)
    expected = {
        "right": [outputs[0], outputs[2], outputs[5]],
        "layers one lower": [outputs[1], outputs[1], outputs[4]],  # below the first is no output
        "layers one higher": [outputs[1], outputs[3], outputs[4]],  # above the last neither
        "another row's features": [other.outputs[layer][count] for layer in LAYERS],
        "features one position late": [outputs[layer][[0, *range(last)]] for layer in LAYERS],
        "features one position early": [outputs[layer][[*range(1, last + 1), last]] for layer in LAYERS],
        "final norm missing": [outputs[0], outputs[2], outputs[5]],
        "final norm twice": [outputs[0], outputs[2], outputs[5]],
    }
    finals = {"final norm missing": outputs[-1], "final norm twice": row.final_twice}
    assert controls.FAULTS.keys() == expected.keys()
    for name, (features, final) in controls.FAULTS.items():
        found = features(LAYERS, row, other)
        assert all(torch.equal(one, wanted) for one, wanted in zip(found, expected[name], strict=True)), name
        assert torch.equal(final(row), finals.get(name, row.final)), name


def test_the_audit_sees_each_in_bfloat16_too() -> None:
    row, other = truths()
    for name, (features, final) in controls.FAULTS.items():
        streams = [state.bfloat16() for state in features(LAYERS, row, other)]
        ids = torch.zeros(len(row.final), dtype=torch.int64)
        document = Document(ids, ids, ids, streams, final(row).bfloat16())
        assert (audited(document, LAYERS, row, BOUNDS) is None) == (name == "right"), name
