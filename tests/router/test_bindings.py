from kvflow.router.bindings import Bindings, binding


def test_the_newest_are_remembered_and_no_more() -> None:
    bindings = Bindings(2)
    for number in range(3):
        bindings.bind(binding("t", f"resp_{number}"), f"decode-{number}")
    bindings.bind(binding("t", "resp_1"), "decode-9")
    assert len(bindings) == 2
    assert bindings.node(binding("t", "resp_0")) is None
    assert bindings.node(binding("t", "resp_1")) == "decode-9"


def test_an_answer_is_another_tenants_business() -> None:
    bindings = Bindings(2)
    bindings.bind(binding("a", "resp_1"), "decode-0")
    assert bindings.node(binding("b", "resp_1")) is None


def test_one_tenants_many_take_no_room_of_anothers_few() -> None:
    bindings = Bindings(4)
    bindings.bind(binding("a", "resp_1"), "decode-0", tenant="a")
    for number in range(9):
        bindings.bind(binding("b", f"resp_{number}"), "decode-1", tenant="b")
    assert len(bindings) == 4
    assert bindings.node(binding("a", "resp_1")) == "decode-0"
    assert bindings.node(binding("b", "resp_8")) == "decode-1"
    assert bindings.node(binding("b", "resp_5")) is None
