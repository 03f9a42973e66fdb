"""PDF: pages are counted and rendered in a sandbox; what can't be is refused by its rule."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.operations.values import Blob, Value
from polyreme_datahub.sandbox.count_pages import PageCounter
from polyreme_datahub.sandbox.sandbox import Sandbox
from polyreme_datahub.sandbox.tasks import SampleTask, SandboxStep, StepMade, StepVerdict


def document() -> bytes:
    """Two pages, 6 by 8 and 8 by 6 inches: a gray ramp, and one in red with a blue corner."""
    ramp = Image.linear_gradient("L").resize((600, 800)).convert("RGB")
    red = Image.new("RGB", (800, 600), (220, 20, 20))
    red.paste((20, 20, 220), (0, 0, 200, 200))
    buffer = io.BytesIO()
    ramp.save(buffer, "PDF", save_all=True, append_images=[red], resolution=100, quality=95)
    return buffer.getvalue()


def with_objects(*objects: bytes, trailer: bytes = b"") -> bytes:
    """A PDF of numbered objects, the first of them the catalog."""
    data, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, start=1):
        places.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    start = len(data)
    data += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    data += b"".join(b"%010d 00000 n \n" % place for place in places)
    return data + b"trailer\n<</Size %d /Root 1 0 R %s>>\nstartxref\n%d\n%%%%EOF" % (len(objects) + 1, trailer, start)


def one_page(box: bytes) -> tuple[bytes, bytes, bytes]:
    return (
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 %s]>>" % box,
    )


def locked() -> bytes:
    """Encrypted (RC4, 40 bits) with a password that is not the empty one."""
    encrypt = b"<</Filter/Standard/V 1/R 2/O<%s>/U<%s>/P -4>>" % (b"ab" * 32, b"cd" * 32)
    return with_objects(*one_page(b"200 200"), encrypt, trailer=b"/Encrypt 4 0 R/ID[<00><00>]")


def render(data: bytes, page: object, *, dpi: int = 100) -> StepMade | StepVerdict:
    blob = Blob(data)
    content = {"id": "d", "kind": "pdf", "document": blob.digest, "page": page, "conversations": []}
    steps = [
        SandboxStep(name="pdf-pages", operation="pdf-pages", inputs=("record",), parameters={"dpi": dpi}),
        SandboxStep(name="decode", operation="decode", inputs=("pdf-pages",)),
    ]
    with Sandbox(steps) as chain:
        (outcome,) = chain.run([SampleTask(key="d", values={"record": Value.of(content, kept=[blob])})])
    end = outcome.steps[0]
    assert isinstance(end, StepMade | StepVerdict)
    assert isinstance(end, StepVerdict) or isinstance(outcome.steps[1], StepMade)
    return end


@pytest.mark.slow
def test_a_page_becomes_an_image_in_the_form_of_a_record() -> None:
    for number, (width, height) in enumerate([(600, 800), (800, 600)]):
        end = render(document(), number)
        assert isinstance(end, StepMade)
        assert {name: end.value.data[name] for name in ("id", "kind", "conversations")} == {
            "id": "d",
            "kind": "images",
            "conversations": [],
        }
        (digest,) = end.value.data["images"]
        image = end.value.blobs[digest].pixels()
        assert abs(image.width - width) <= 1
        assert abs(image.height - height) <= 1
        assert image.mode == ("L" if number == 0 else "RGB")
        assert (
            abs(float(np.asarray(image)[image.height // 2, image.width // 2].mean()) - (127 if number == 0 else 86)) < 4
        )


def test_the_resolution_is_a_parameter() -> None:
    end = render(document(), 0, dpi=36)
    assert isinstance(end, StepMade)
    (digest,) = end.value.data["images"]
    assert end.value.blobs[digest].pixels().size == (216, 288)


@pytest.mark.parametrize(
    ("data", "page", "rule"),
    [
        (document(), 2, "pdf-page"),
        (document(), -1, "pdf-page"),
        (document(), "1", "pdf-page"),
        (locked(), 0, "pdf-password"),
        (document()[:3000], 0, "pdf"),
        (b"%PDF-1.7 and nothing more", 0, "pdf"),
        (b"", 0, "empty"),
        (b"\x89PNG\r\n\x1a\n" + bytes(2000), 0, "pdf"),
        (with_objects(*one_page(b"200000 200000")), 0, "image-size"),
    ],
)
def test_what_can_not_be_rendered_has_its_rule(data: bytes, page: object, rule: str) -> None:
    end = render(data, page)
    assert isinstance(end, StepVerdict)
    assert (end.step, end.rule) == ("pdf-pages", rule)


def test_pages_are_counted_in_a_sandbox() -> None:
    counter = PageCounter()
    try:
        assert counter.count(document()) == 2
        for data, rule in ((locked(), "pdf-password"), (b"text", "pdf")):
            with pytest.raises(BadRecordError) as refused:
                counter.count(data)
            assert refused.value.rule == rule
        assert counter.count(with_objects(*one_page(b"10 10"))) == 1
    finally:
        counter.close()
