"""A reader of compiled programs finds slices of host memory that a GPU would copy wrongly."""

import json

import pytest

from benchmarks import host_access

#: A loop of three over a stack of four, as XLA prints it, without ignored parts; `{...}` varies.
PROGRAM = """HloModule jit_step, is_scheduled=true

%sliced (p0: bf16[4,8,16], p1: s32[], p2: s32[]) -> bf16[1,8,16] {{
  %p0 = bf16[4,8,16]{{2,1,0:S(5)}} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = s32[] parameter(2)
  ROOT %slice = bf16[1,8,16]{{2,1,0}} dynamic-slice(%p0, %p1, %p2, %p2), \
dynamic_slice_sizes={{1,8,16}}{walk}
}}

%next (p0: s32[]) -> (s32[], s32[]) {{
  %p0 = s32[] parameter(0)
  %one = s32[] constant(1)
  %add = s32[] add(%p0, %one)
  ROOT %pair = (s32[], s32[]) tuple(%add, %p0)
}}

%body (state: (s32[], bf16[4,8,16], s32[])) -> (s32[], bf16[4,8,16], s32[]) {{
  %state = (s32[], bf16[4,8,16]{{2,1,0:S(5)}}, /*index=2*/s32[]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %stack = bf16[4,8,16]{{2,1,0:S(5)}} get-tuple-element(%state), index=1
  %other = s32[] get-tuple-element(%state), index=2
  %zero = s32[] constant(0)
  %last = s32[] constant(3)
  %least = s32[] minimum(%i, %last)
  %table = s32[3]{{0}} constant({{2, 1, 0}})
  %entry = s32[1]{{0}} dynamic-slice(%table, %i), dynamic_slice_sizes={{1}}
  %looked_up = s32[] bitcast(%entry)
  %down = s32[] subtract(%last, %i)
  %pair = (s32[], s32[]) fusion(%i), kind=kLoop, calls=%next
  %start = ((bf16[4,8,16]{{2,1,0:S(5)}}, s32[], s32[]), bf16[1,8,16]{{2,1,0}}, u32[]) \
fusion-start(%stack, {index}, %zero), kind=kLoop, calls=%sliced
  %done = bf16[1,8,16]{{2,1,0}} fusion-done(%start)
  ROOT %new = (s32[], bf16[4,8,16]{{2,1,0:S(5)}}, s32[]) tuple(%pair#0, %stack, %other)
}}

%condition (state: (s32[], bf16[4,8,16], s32[])) -> pred[] {{
  %state = (s32[], bf16[4,8,16]{{2,1,0:S(5)}}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %n = s32[] constant(3)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}}

ENTRY %main (weights: bf16[4,8,16], a: s32[]) -> (s32[], bf16[4,8,16], s32[]) {{
  %weights = bf16[4,8,16]{{2,1,0}} parameter(0)
  %a = s32[] parameter(1)
  %begin = s32[] constant(0)
  %copy-start = (bf16[4,8,16]{{2,1,0:S(5)}}, bf16[4,8,16]{{2,1,0}}, u32[]) copy-start(%weights)
  %copy-done = bf16[4,8,16]{{2,1,0:S(5)}} copy-done(%copy-start)
  %init = (s32[], bf16[4,8,16]{{2,1,0:S(5)}}, s32[]) tuple(%begin, %copy-done, %a)
  ROOT %loop = (s32[], bf16[4,8,16]{{2,1,0:S(5)}}, s32[]) while(%init), condition=%condition, \
body=%body, backend_config={{"known_trip_count":{{"n":"3"}},"known_init_step":{{"init":"0","step":\
"1"}},"known_induction_variable":{{"tuple_index":"0"}}}}
}}
"""


def read(index, annotation, text=PROGRAM):
    config = json.dumps({"dynamic_slice_config": annotation}, separators=",:")
    walk = f", backend_config={config}" if annotation else ""
    return host_access.traffic(text.format(index=index, walk=walk))


def flat(offset, stride):
    return {"loop_index": "0", "byte_offset": str(offset), "byte_stride": str(stride)}


def nested(offset, stride):
    linear = {"byte_offset": str(offset), "byte_stride": str(stride)}
    return flat(0, 0) | {"linear": linear}  # since jax 0.12


@pytest.mark.parametrize("form", [flat, nested])
@pytest.mark.parametrize(
    ("index", "offset", "stride"),
    [
        ("%i", 0, 256),
        ("%least", 0, 256),
        ("%pair#0", 256, 256),  # i + 1, inside a fusion
        ("%looked_up", 512, -256),
        ("%down", 768, -256),
    ],
)
def test_a_slice_at_the_loop_index_is_correct_and_any_other_slice_is_wrong(
    index, offset, stride, form
):
    assert read(index, form(offset, stride)) == host_access.Traffic(1, [], [], 1, 0)
    for other in ((offset + 256, stride), (offset, -stride), (offset, 0)):
        found = read(index, form(*other))
        assert (found.right, found.kernels) == (0, [])
        assert "the index is" in found.wrong[0]


@pytest.mark.parametrize(
    "annotation",
    [
        flat(0, 0) | {"table": {"offsets": ["0", "256", "512"]}},
        flat(0, 256) | {"loop_index": "1"},
        nested(0, 256) | {"byte_stride": "256"},
        nested(0, 256) | {"linear": {}},
        nested(0, 256) | {"linear": flat(0, 256)},
    ],
)
def test_an_annotation_in_an_unknown_form_raises_an_error(annotation):
    with pytest.raises(ValueError, match="unknown form"):
        read("%i", annotation)


def test_a_slice_without_a_walk_belongs_to_a_kernel():
    found = read("%i", None)
    assert (found.right, found.wrong, len(found.kernels)) == (0, [], 1)


@pytest.mark.parametrize(
    ("index", "annotation", "change", "problem"),
    [
        ("%other", flat(0, 256), ("", ""), "its index is unknown"),
        ("%done", flat(0, 256), ("", ""), "its index is unknown"),
        ("%i", flat(0, 256), ("known_trip_count", "unknown"), "trip count"),
        # The index stays at the last layer; an unclamped one would read past the array's end.
        ("%pair#0", flat(256, 256), ('"n":"3"', '"n":"4"'), "is [1, 2, 3, 3], the walk [1, 2, 3"),
    ],
)
def test_a_slice_that_cannot_be_followed_or_is_clamped_is_not_accepted(
    index, annotation, change, problem
):
    assert problem in read(index, annotation, PROGRAM.replace(*change)).wrong[0]


def test_large_copies_on_the_device_are_found():
    line = "  %x = bf16[4,8,16]{2,1,0} copy(%weights)\n"
    text = PROGRAM.format(index="%i", walk="").replace("  %begin", f"{line}  %begin")
    assert len(list(host_access.large_copies(text, 1024))) == 1
    assert not list(host_access.large_copies(text, 1025))
