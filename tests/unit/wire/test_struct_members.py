"""The compiled request path remembers where members and methods are; results are Python's."""

from types import ModuleType
from typing import Any

import msgspec
import pytest

from isochrone import compiled
from tests.c_module import compile_now

MODULE = """
#include "%s"

static PyObject *read_named(PyObject *self, PyObject *arguments) {
    PyObject *object, *name;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "OU", &object, &name)) return NULL;
    Py_INCREF(name);
    PyUnicode_InternInPlace(&name);
    PyObject *value = PyObject_GetAttr(object, name);
    Py_DECREF(name);
    return value;
}

static PyObject *is_remembered(PyObject *self, PyObject *arguments) {
    PyObject *type, *name;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "OU", &type, &name)) return NULL;
    Py_INCREF(name);
    PyUnicode_InternInPlace(&name);
    unsigned version = ((PyTypeObject *)type)->tp_version_tag;
    int is_there = is_of(place_of(version, name), version, name);
    Py_DECREF(name);
    return PyBool_FromLong(is_there);
}

static PyObject *call(PyObject *self, PyObject *arguments) {
    PyObject *given[3] = {NULL, NULL, NULL}, *name;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "OU|O", &given[1], &name, &given[2])) return NULL;
    Py_INCREF(name);
    PyUnicode_InternInPlace(&name);
    size_t count = (given[2] ? 2 : 1) | PY_VECTORCALL_ARGUMENTS_OFFSET;
    PyObject *value = PyObject_VectorcallMethod(name, given + 1, count, NULL);
    Py_DECREF(name);
    return value;
}

static PyMethodDef METHODS[] = {
    {"read", read_named, METH_VARARGS, NULL},
    {"call", call, METH_VARARGS, NULL},
    {"is_remembered", is_remembered, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef NAMED = {
    PyModuleDef_HEAD_INIT, "members", NULL, -1, METHODS, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_members(void) { return PyModule_Create(&NAMED); }
"""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    size: int = 0


class Slots:
    __slots__ = ("name",)
    name: Any


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    folder = tmp_path_factory.mktemp("members")
    source = folder / "members.c"
    header = compiled.ROOT / compiled.STRUCT_MEMBERS
    source.write_text(MODULE % header)
    return compile_now(source, folder)


def test_members_are_remembered_for_all_objects_of_a_type(members: ModuleType) -> None:
    entries = [Entry(name="a", size=1), Entry(name="b"), Entry(name="c", size=3)]
    assert [members.read(entry, "name") for entry in entries] == ["a", "b", "c"]
    assert [members.read(entry, "size") for entry in entries] == [1, 0, 3]
    assert members.is_remembered(Entry, "name")
    assert members.is_remembered(Entry, "size")


def test_each_type_has_its_own_places(members: ModuleType) -> None:
    class Longer(msgspec.Struct):
        size: int
        other: str
        name: str

    for _ in range(3):
        assert members.read(Entry(name="a"), "name") == "a"
        assert members.read(Longer(1, "x", "b"), "name") == "b"


def test_a_member_that_is_not_set_is_an_error(members: ModuleType) -> None:
    slots = Slots()
    slots.name = "a"
    assert members.read(slots, "name") == "a"
    assert members.is_remembered(Slots, "name")
    del slots.name
    with pytest.raises(AttributeError):
        members.read(slots, "name")
    with pytest.raises(AttributeError):
        members.read(Slots(), "name")


def test_a_type_that_changes_is_read_anew(members: ModuleType) -> None:
    class Base:
        __slots__ = ("name",)
        name: str

    class Derived(Base):
        __slots__ = ()

    changing: Any = Base
    derived = Derived()
    derived.name = "a"
    assert [members.read(derived, "name") for _ in range(2)] == ["a", "a"]
    assert members.is_remembered(Derived, "name")
    changing.name = property(lambda self: "changed")
    assert not members.is_remembered(Derived, "name")
    assert members.read(derived, "name") == "changed"
    changing.__getattribute__ = lambda self, name: f"any {name}"
    assert members.read(derived, "name") == "any name"


def test_a_member_of_another_class_is_refused(members: ModuleType) -> None:
    class Borrower:
        name: Any = vars(Slots)["name"]

    for _ in range(2):
        with pytest.raises(TypeError):
            members.read(Borrower(), "name")
    assert not members.is_remembered(Borrower, "name")


def test_all_other_attributes_are_read_in_pythons_way(members: ModuleType) -> None:
    class Plain:
        shared = "class"

    plain: Any = Plain()
    assert members.read(plain, "shared") == "class"
    plain.shared = "own"
    assert members.read(plain, "shared") == "own"
    with pytest.raises(AttributeError):
        members.read(plain, "missing")
    assert members.read(Entry, "__name__") == "Entry"
    assert members.read(3.5, "real") == 3.5


def test_methods_of_objects_without_attributes_are_remembered(members: ModuleType) -> None:
    class Stack:
        __slots__ = ("items",)

        def push(self, item: int) -> int:
            return item + 1

    numbers = [3]
    for number in range(3):
        members.call(numbers, "append", number)
    assert numbers == [3, 0, 1, 2]
    assert members.call("a", "upper") == "A"
    assert [members.call(Stack(), "push", number) for number in range(3)] == [1, 2, 3]
    assert members.is_remembered(list, "append")
    assert members.is_remembered(str, "upper")
    assert members.is_remembered(Stack, "push")
    with pytest.raises(TypeError):
        members.call(numbers, "append")
    with pytest.raises(AttributeError):
        members.call(numbers, "missing")


def test_a_method_and_a_member_are_told_apart(members: ModuleType) -> None:
    slots = Slots()
    for name in ("a", "b", "c"):
        slots.name = name.upper
        assert members.call(slots, "name") == name.upper()
        assert members.read(slots, "name")() == name.upper()
        assert members.read(name, "upper")() == members.call(name, "upper") == name.upper()


def test_an_object_may_hide_the_method_of_its_class(members: ModuleType) -> None:
    class Plain:
        def answer(self) -> str:
            return "class"

    plain: Any = Plain()
    assert members.call(plain, "answer") == "class"
    plain.answer = lambda: "own"
    assert members.call(plain, "answer") == "own"
    assert not members.is_remembered(Plain, "answer")


def test_a_method_may_replace_itself(members: ModuleType) -> None:
    class Base:
        __slots__ = ()

    class Derived(Base):
        __slots__ = ()

    changing: Any = Base

    def first(_self: object, _argument: object) -> str:
        changing.answer = lambda _self, _argument: "second"
        return "first"

    changing.answer = first
    del first
    assert [members.call(Derived(), "answer", 0) for _ in range(3)] == ["first", "second", "second"]
    changing.answer = classmethod(lambda named, _argument: named.__name__)
    assert members.call(Derived(), "answer", 0) == "Derived"


def test_attributes_that_a_function_returns_are_remembered(members: ModuleType) -> None:
    class Measured(float):
        pass

    class Borrower:
        real: Any = vars(float)["real"]

    measured = Measured(2.5)
    measured.__dict__["real"] = "hidden by the class"
    for _ in range(2):
        assert members.read(3.5, "real") == 3.5
        assert members.read(measured, "real") == measured.real == 2.5
        with pytest.raises(TypeError):
            members.read(Borrower(), "real")
        with pytest.raises(AttributeError):
            members.read(type("Plain", (), {}), "__abstractmethods__")
    assert members.is_remembered(float, "real")
    assert members.is_remembered(Measured, "real")
    assert not members.is_remembered(Borrower, "real")
