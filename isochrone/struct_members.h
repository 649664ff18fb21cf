/* Makes reads of struct attributes, and calls of methods in C, cheap in the compiled request path.
 *
 * The compiler does not know how msgspec lays out a struct, so it reads each attribute with
 * PyObject_GetAttr, which looks the name up in the type and calls the descriptor that it finds: 163
 * instructions. A member is at the same place in all objects of a type. So the place is remembered
 * for the type and the name, and read from there. Attributes that a function in C returns, as those of
 * compiled classes, and the methods of a type whose objects have no attributes of their own are
 * remembered likewise. Everything else is done as before.
 *
 * setup.py has this file included before each generated file, which needs no other change.
 */
#ifndef ISOCHRONE_STRUCT_MEMBERS_H
#define ISOCHRONE_STRUCT_MEMBERS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <structmember.h>

enum { PLACES = 4096 }; /* remembered; those that fall together take turns */

typedef struct {
    PyObject *name;   /* interned, and kept alive: no other name has its address */
    /* The type keeps these alive while it has this version. */
    PyObject *method;
    PyGetSetDef *getter;
    Py_ssize_t offset; /* of a member, if it is neither */
    unsigned version;
} Place;

static Place places[PLACES];

static inline Place *place_of(unsigned version, PyObject *name) {
    return &places[(version * 31 + ((uintptr_t)name >> 4)) % PLACES];
}

/* Python gives a type another version when it or one of its bases changes, and no version twice; 0
 * is none. */
static inline int is_of(const Place *place, unsigned version, PyObject *name) {
    return place->name == name && place->version == version && version;
}

/* Finds out whether an attribute is a member or a method, and remembers it. */
__attribute__((noinline, unused)) static void remember(PyTypeObject *type, PyObject *name) {
    if (type->tp_getattro != PyObject_GenericGetAttr) return;
    if (!PyUnicode_CheckExact(name) || !PyUnicode_CHECK_INTERNED(name)) return;
    PyObject *found = _PyType_Lookup(type, name); /* borrowed; gives the type a version */
    if (!found || !type->tp_version_tag) return;
    Place new = {.name = name, .version = type->tp_version_tag};
    if (Py_IS_TYPE(found, &PyMemberDescr_Type)) {
        PyMemberDef *member = ((PyMemberDescrObject *)found)->d_member;
        if (member->type != T_OBJECT_EX || (member->flags & ~READONLY)) return;
        /* Python checks this at each read: a descriptor can be put into another class. */
        if (!PyType_IsSubtype(type, PyDescr_TYPE(found))) return;
        new.offset = member->offset;
    } else if (Py_IS_TYPE(found, &PyGetSetDescr_Type)) {
        new.getter = ((PyGetSetDescrObject *)found)->d_getset;
        if (!new.getter->get || !PyType_IsSubtype(type, PyDescr_TYPE(found))) return;
    } else if (
        PyType_HasFeature(Py_TYPE(found), Py_TPFLAGS_METHOD_DESCRIPTOR) && !type->tp_dictoffset) {
        new.method = found;
    } else {
        return;
    }
    Place *place = place_of(new.version, name);
    PyObject *before = place->name;
    Py_INCREF(name);
    *place = new;
    Py_XDECREF(before);
}

/* PyObject_GetAttr. A member that is not set is read in Python's way, which raises the error. Not
 * inline: it stands in thousands of places. */
__attribute__((noinline, unused)) static PyObject *read_attribute(
    PyObject *object, PyObject *name) {
    unsigned version = Py_TYPE(object)->tp_version_tag;
    Place *place = place_of(version, name);
    if (!is_of(place, version, name)) {
        remember(Py_TYPE(object), name);
    } else if (place->getter) {
        return place->getter->get(object, place->getter->closure);
    } else if (!place->method) {
        PyObject *value = *(PyObject **)((char *)object + place->offset);
        if (value) {
            Py_INCREF(value);
            return value;
        }
    }
    return PyObject_GetAttr(object, name);
}

/* PyObject_VectorcallMethod. */
__attribute__((noinline, unused)) static PyObject *call_method(
    PyObject *name, PyObject *const *arguments, size_t count, PyObject *names) {
    PyTypeObject *type = Py_TYPE(arguments[0]);
    Place *place = place_of(type->tp_version_tag, name);
    if (!is_of(place, type->tp_version_tag, name)) {
        remember(type, name);
    } else if (place->method) {
        PyObject *method = place->method; /* The call may change the type. */
        Py_INCREF(method);
        /* The place before the object is not the callee's to use. */
        count &= ~PY_VECTORCALL_ARGUMENTS_OFFSET;
        PyObject *result = PyObject_Vectorcall(method, arguments, count, names);
        Py_DECREF(method);
        return result;
    }
    return PyObject_VectorcallMethod(name, arguments, count, names);
}

#ifndef Py_GIL_DISABLED /* without that lock two threads could see half of a place */
#define PyObject_GetAttr read_attribute
#define PyObject_VectorcallMethod call_method
#endif

#endif
