"""A plan as text and as a picture."""

import xml.etree.ElementTree as ElementTree

from thinrow.features import Bucketize, Cross, FeaturePlan, Hash, Log1p, Mod, Source, explain, to_dot, to_svg

PRICE, ITEM = Source("cand.price"), Source("cand.item")
PLAN = FeaturePlan(
    {
        "price<bucket>": Bucketize(Log1p(PRICE), (0.5, 1)),
        "item": Mod(Hash(ITEM), 8),
        "same": Mod(Hash(ITEM), 8),
        "pair": Cross((ITEM, Source("ctx.store")), buckets=97),
    }
)


def test_the_text_names_every_step_once():
    assert explain(PLAN).splitlines() == [
        "0  cand     source cand.price",
        "1  cand     log1p(0)                           pass 0",
        "2  cand     bucketize(1, boundaries=[0.5, 1])  pass 0    -> price<bucket>",
        "3  cand     source cand.item",
        "4  cand     hash(3, seed=0)                    pass 3",
        "5  cand     mod(4, divisor=8)                  pass 3    -> item, same",
        "6  ctx      source ctx.store",
        "7  ctx      hash(6, seed=0)                    pass 6",
        "8  cand     cross(4, 7, buckets=97, seed=0)              -> pair",
    ]
    assert explain(FeaturePlan({})) == ""


def test_the_picture_has_every_step_and_edge():
    root = ElementTree.fromstring(to_svg(PLAN))
    space = "{http://www.w3.org/2000/svg}"
    boxes = root.findall(f"{space}g")
    assert len(boxes) == 9
    assert len(root.findall(f"{space}path")) == 7
    texts = [t.text for t in root.iter(f"{space}text")]
    assert "price<bucket>" in texts
    assert "item, same" in texts
    width, height = (float(v) for v in root.get("viewBox").split()[2:])
    places = [tuple(float(box.find(f"{space}rect").get(k)) for k in ("x", "y", "width", "height")) for box in boxes]
    assert all(x >= 0 and y >= 0 and x + w <= width and y + h <= height for x, y, w, h in places)
    for i, (x, y, w, h) in enumerate(places):
        assert not any(x < a + c and a < x + w and y < b + d and b < y + h for a, b, c, d in places[i + 1 :])
    ElementTree.fromstring(to_svg(FeaturePlan({})))


def test_graphviz_has_the_same_graph():
    dot = to_dot(PLAN)
    assert dot.count("label=") == 9
    assert dot.count("->") == 7
    assert "n4 -> n5;" in dot
