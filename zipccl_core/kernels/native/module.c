/* The extension module zipccl_core.kernels._native: exponent.h for Python. Buffers come as addresses, so that nothing of torch is
 * needed to build it, and one build on the limited API serves every Python from 3.10 on. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <limits.h>

#include "exponent.h"

/* ---- arguments ---- */

static int check_count(const char *function, Py_ssize_t given, Py_ssize_t wanted) {
    if (given == wanted)
        return 1;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", function, wanted, given);
    return 0;
}

/* The converters leave an exception behind where they fail; the callers look for one after all of them. */

static uint64_t as_u64(PyObject *object) { return PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(object); }

static int as_int(PyObject *object) {
    long value = PyErr_Occurred() ? 0 : PyLong_AsLong(object);
    if (value < INT_MIN || value > INT_MAX) {
        PyErr_Format(PyExc_OverflowError, "%ld does not fit into a C int", value);
        return 0;
    }
    return (int)value;
}

static float as_float(PyObject *object) { return PyErr_Occurred() ? 0 : (float)PyFloat_AsDouble(object); }

static void *as_address(PyObject *object) { return (void *)(uintptr_t)as_u64(object); }

static uint64_t as_numel(PyObject *object) {
    uint64_t numel = as_u64(object);
    if (!PyErr_Occurred() && numel > ZIPCCL_MAX_NUMEL)
        PyErr_Format(PyExc_ValueError, "numel is %llu; the wire format ends at 2**32 - 1", (unsigned long long)numel);
    return numel;
}

/* Seven exponents as bytes, or None. */
static const uint8_t *as_table(PyObject *object) {
    char *bytes;
    Py_ssize_t size;
    if (PyErr_Occurred() || object == Py_None || PyBytes_AsStringAndSize(object, &bytes, &size) < 0)
        return NULL;
    if (size != 7)
        PyErr_Format(PyExc_ValueError, "table has %zd exponents; wanted: 7", size);
    return (const uint8_t *)bytes;
}

/* ---- functions ---- */

PyDoc_STRVAR(encode_doc,
             "encode(values, numel, static_part, dynamic, dynamic_capacity, fixed_base, table, threads, /)\n--\n\n"
             "Encode bfloat16 values; return the number of escapes, or -1 where they exceed dynamic_capacity.\n\n"
             "Buffers are addresses, 0 for none. fixed_base is -1 to choose base and mode block by block; table is None, or seven\n"
             "different exponents as bytes.");

static PyObject *encode(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    (void)module;
    if (!check_count("encode", n_args, 8))
        return NULL;
    const uint16_t *values = as_address(args[0]);
    uint64_t numel = as_numel(args[1]);
    uint8_t *static_part = as_address(args[2]);
    uint8_t *dynamic = as_address(args[3]);
    uint64_t capacity = as_u64(args[4]);
    int fixed_base = as_int(args[5]);
    const uint8_t *table = as_table(args[6]);
    int threads = as_int(args[7]);
    if (PyErr_Occurred())
        return NULL;
    if (fixed_base < -1 || fixed_base > 249)
        return PyErr_Format(PyExc_ValueError, "fixed_base is %d; wanted: 0 to 249, or -1", fixed_base);
    if (capacity % 128 != 0)
        return PyErr_Format(PyExc_ValueError, "dynamic_capacity is %llu; wanted: a multiple of 128",
                            (unsigned long long)capacity);
    int64_t n_escapes;
    Py_BEGIN_ALLOW_THREADS
    n_escapes = zipccl_exponent_encode(values, numel, static_part, dynamic, capacity, fixed_base, table, threads);
    Py_END_ALLOW_THREADS
    return PyLong_FromLongLong(n_escapes);
}

PyDoc_STRVAR(decode_doc, "decode(static_part, dynamic, n_escapes, numel, table, out, threads, /)\n--\n\n"
                         "Decode numel bfloat16 values into out; return 0 or a code for message().\n\n"
                         "Buffers, table too, are addresses, 0 for none. The caller has checked that dynamic holds\n"
                         "n_escapes bytes.");

static PyObject *decode(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    (void)module;
    if (!check_count("decode", n_args, 7))
        return NULL;
    const uint8_t *static_part = as_address(args[0]);
    const uint8_t *dynamic = as_address(args[1]);
    uint64_t n_escapes = as_u64(args[2]);
    uint64_t numel = as_numel(args[3]);
    const uint8_t *table = as_address(args[4]);
    uint16_t *out = as_address(args[5]);
    int threads = as_int(args[6]);
    if (PyErr_Occurred())
        return NULL;
    int error;
    Py_BEGIN_ALLOW_THREADS
    error = zipccl_exponent_decode(static_part, dynamic, n_escapes, numel, table, out, threads);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(error);
}

PyDoc_STRVAR(message_doc, "message(code, /)\n--\n\nReturn what a code of decode() means.");

static PyObject *message(PyObject *module, PyObject *code) {
    (void)module;
    int value = as_int(code);
    return PyErr_Occurred() ? NULL : PyUnicode_FromString(zipccl_error_message(value));
}

PyDoc_STRVAR(accumulate_doc, "accumulate(values, n, sum, first, threads, /)\n--\n\n"
                             "Add n bfloat16 values to the fp32 values at sum, or store them there where first is true.");

static PyObject *accumulate(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    (void)module;
    if (!check_count("accumulate", n_args, 5))
        return NULL;
    const uint16_t *values = as_address(args[0]);
    uint64_t n = as_numel(args[1]);
    float *sum = as_address(args[2]);
    int first = as_int(args[3]);
    int threads = as_int(args[4]);
    if (PyErr_Occurred())
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    zipccl_bf16_accumulate(values, n, sum, first, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyDoc_STRVAR(round_doc, "round_(sum, n, divisor, out, threads, /)\n--\n\n"
                        "Store n fp32 values, divided by divisor, as bfloat16, ties to even and every NaN as 0x7fc0.");

static PyObject *round_(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    (void)module;
    if (!check_count("round_", n_args, 5))
        return NULL;
    const float *sum = as_address(args[0]);
    uint64_t n = as_numel(args[1]);
    float divisor = as_float(args[2]);
    uint16_t *out = as_address(args[3]);
    int threads = as_int(args[4]);
    if (PyErr_Occurred())
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    zipccl_bf16_round(sum, n, divisor, out, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyDoc_STRVAR(target_doc, "target()\n--\n\nReturn the instruction set in use: 'avx2' or 'portable'.");

static PyObject *target(PyObject *module, PyObject *no_args) {
    (void)module, (void)no_args;
    return PyUnicode_FromString(zipccl_kernels_target());
}

PyDoc_STRVAR(force_target_doc, "force_target(name, /)\n--\n\n"
                               "Use 'avx2' or 'portable' from now on, in the whole process, or with 'auto' the best; for tests.\n\n"
                               "Raises ValueError where this machine lacks it.");

static PyObject *force_target(PyObject *module, PyObject *name) {
    (void)module;
    PyObject *bytes = PyUnicode_AsUTF8String(name);
    if (bytes == NULL)
        return NULL;
    int error = zipccl_kernels_force(PyBytes_AsString(bytes));
    Py_DECREF(bytes);
    if (error)
        return PyErr_Format(PyExc_ValueError, "target %R is not available; known: 'auto', 'avx2', 'portable'", name);
    Py_RETURN_NONE;
}

/* ---- the module ---- */

/* By way of a function pointer without arguments, the only cast between function types that compilers do not warn about. */
#define FASTCALL(function) (PyCFunction)(void (*)(void))(function), METH_FASTCALL

static PyMethodDef methods[] = {
    {"encode", FASTCALL(encode), encode_doc},
    {"decode", FASTCALL(decode), decode_doc},
    {"accumulate", FASTCALL(accumulate), accumulate_doc},
    {"round_", FASTCALL(round_), round_doc},
    {"message", message, METH_O, message_doc},
    {"target", target, METH_NOARGS, target_doc},
    {"force_target", force_target, METH_O, force_target_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_native",
    .m_doc = "CPU kernels of the codec `exponent` and of the fp32 reduction of bfloat16; see exponent.h.",
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
