"""Where objects are held, by names that don't depend on when they were made."""

import sys
import weakref
from collections import deque
from typing import Any, cast

import pytest

from lockstep.doctor.watch.places import find_places


class Thing:
    pass


class Holder:
    def __init__(self, thing):
        self.inner = {"key": [None, thing]}


def places(*things):
    caller = sys._getframe(1)
    found = find_places({id(thing) for thing in things}, caller)
    return [found.get(id(thing), "").removeprefix(f"{caller.f_code.co_name}.") for thing in things]


class Slotted:
    __slots__ = ("empty", "inner")

    def __init__(self, inner):
        self.inner = inner


AT_THE_TOP = Thing()


def test_variables_attributes_keys_and_indices_lead_there():
    local, inside = Thing(), Thing()
    holder = Holder(inside)
    assert places(local, inside) == ["local", "inside"]
    del inside
    held = holder.inner["key"][1]
    number = id(held)
    del held
    assert find_places({number}, sys._getframe())[number].endswith("there.holder.inner['key'][1]")
    assert holder.inner


def test_slots_lead_there_even_if_others_are_empty():
    holder = Slotted(Thing())
    number = id(holder.inner)
    assert find_places({number}, sys._getframe())[number].endswith("holder.inner")


def test_what_a_module_holds_is_named_by_it():
    same = AT_THE_TOP
    assert places(same) == [f"{__name__}.AT_THE_TOP"]


def test_what_functions_and_methods_remember_is_found():
    def remembering():
        thing = Thing()
        return (lambda: thing), thing

    closure, thing = remembering()
    assert closure() is thing
    kept = id(thing)
    del thing
    assert find_places({kept}, sys._getframe())[kept].endswith("closure().thing")
    bound = Holder(Thing()).__init__
    assert find_places({id(bound.__self__)}, sys._getframe())[id(bound.__self__)].endswith(".bound")


def test_what_nothing_leads_to_has_no_place():
    held = iter([Thing()])  # an iterator tells nobody what it holds
    hidden = held.__reduce__()[1][0][0]
    number = id(hidden)
    del hidden
    assert find_places({number}, sys._getframe()) == {}


def test_what_the_script_lets_go_dies():
    thing = Thing()
    gone = weakref.ref(thing)
    assert places(thing) == ["thing"]
    del thing
    assert gone() is None


def test_variables_that_the_script_took_as_a_dictionary_stay_there():
    thing = Thing()
    taken = locals()
    assert places(thing) == ["thing"]
    assert taken["thing"] is thing


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="a function keeps no names of exec")
def test_names_that_the_script_made_by_exec_stay_there():
    thing = Thing()
    exec("hidden = 1")
    assert places(thing) == ["thing"]
    assert eval("hidden") == 1


def test_circles_end():
    first = deque()
    first.append({"back": first})
    assert places(first, Thing())[0] == "first"


class Secretive:
    """Answers no question, as a proxy whose object is gone or not loaded yet."""

    @property
    def __class__(self):
        raise ReferenceError("gone")


class Unreadable(list):
    def __iter__(self):
        raise RuntimeError("not now")


def test_objects_that_answer_no_question_stop_no_search():
    gone = weakref.proxy(Thing())
    secretive, unreadable, thing = Secretive(), Unreadable([gone]), Thing()
    cast("dict[Any, Any]", vars(thing))[1] = "an attribute without a name"
    place = places(thing)
    assert place == ["thing"]
    del secretive, unreadable
