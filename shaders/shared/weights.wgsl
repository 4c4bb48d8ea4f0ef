// Packed weights read back; kernels/pack.rs describes the planes and sets the defines. The kernel file declares
//   wq: array<vec4<u32>>, wh: array<HighBits> if HAS_HIGH, ws: array<Scales> if QUANTISED,
// or, with TEXELS, imports weight_planes, whose textures hold the same; main then calls open_planes(block) first.
// A block is 64 rows; `row` counts within it. `groups` is the number of groups of 32 along k.

#ifdef TEXELS
/// First texel of the block's rows, and the block's place from top to bottom.
var<private> block_place: vec2<u32>;

/// Chooses the block that is read from then on.
fn open_planes(block: u32) {
  let row_blocks = textureDimensions(wq).x / 64u;
  block_place = vec2((block % row_blocks) * 64u, block / row_blocks);
}

/// Texel of item `i` of a row, in a plane with `height` items in a block.
fn texel_at(height: u32, i: u32, row: u32) -> vec2<u32> {
  return vec2(block_place.x + row, block_place.y * height + i);
}
#endif

/// Granule `i` of a row of a block that has `granules` of them.
fn granule(block: u32, granules: u32, i: u32, row: u32) -> vec4<u32> {
#ifdef TEXELS
  return textureLoad(wq, texel_at(granules, i, row));
#else
  return wq[(block * granules + i) * 64u + row];
#endif
}

#ifdef QUANTISED
#ifdef FIFTHS
/// Bit 8b + i is bit 4 of element 4i + b.
alias HighBits = u32;
#endif
#ifdef SIXTHS
/// Bits 8b + 2i of word i / 4 are bits 4 and 5 of element 4i + b.
alias HighBits = vec2<u32>;
#endif
#ifdef SCALE_HALF
/// Two f16 scales.
alias Scales = u32;
#endif
#ifdef SCALE_PAIR
/// f16 scale and minimum.
alias Scales = u32;
#endif
#ifdef SCALE_K
/// f16 d and dmin; 12 bytes of 6-bit scales and minimums of 8 groups.
alias Scales = vec4<u32>;
#endif
#ifdef SIXTHS
/// 8 x i8 scales of 16 elements; f16 d.
alias Scales = vec4<u32>;
#endif

/// 32 elements as signed bytes: 0..16 and 16..32.
struct Elements { low: vec4<u32>, high: vec4<u32> }

const NIBBLE_MASK: vec4<u32> = vec4<u32>(0x0f0f0f0fu);

fn group_elements(block: u32, groups: u32, g: u32, row: u32) -> Elements {
#ifdef BYTES
  return Elements(granule(block, groups * 2u, g * 2u, row), granule(block, groups * 2u, g * 2u + 1u, row));
#else
  let q = granule(block, groups, g, row);
  let low = q & NIBBLE_MASK;
  let high = (q >> vec4(4u)) & NIBBLE_MASK;
#ifdef FIFTHS
#ifdef TEXELS
  let h = textureLoad(wh, texel_at(groups, g, row)).x;
#else
  let h = wh[(block * groups + g) * 64u + row];
#endif
  let ones = vec4(0x01010101u);
  return Elements(
    low | (((vec4(h) >> vec4(0u, 1u, 2u, 3u)) & ones) << vec4(4u)),
    high | (((vec4(h) >> vec4(4u, 5u, 6u, 7u)) & ones) << vec4(4u)),
  );
#else
#ifdef SIXTHS
#ifdef TEXELS
  let h = textureLoad(wh, texel_at(groups, g, row)).xy;
#else
  let h = wh[(block * groups + g) * 64u + row];
#endif
  return Elements(sixths(low, h.x), sixths(high, h.y));
#else
  return Elements(low, high);
#endif
#endif
#endif
}

#ifdef SIXTHS
/// Signed 6-bit elements from their nibbles and the word with their upper bits.
fn sixths(nibbles: vec4<u32>, h: u32) -> vec4<u32> {
  let upper = ((vec4(h) >> vec4(0u, 2u, 4u, 6u)) & vec4(0x03030303u)) << vec4(4u);
  // q - 32 in each byte; the top bit keeps a borrow within its byte.
  return ((nibbles | upper | vec4(0x80808080u)) - vec4(0x20202020u)) ^ vec4(0x80808080u);
}
#endif

#ifdef SCALE_K
const SCALE_GROUPS: u32 = 8u;
#else
const SCALE_GROUPS: u32 = 4u;
#endif

#ifdef TEXELS
/// What holds the scales of a group and of its neighbours: SCALE_GROUPS of them, from a multiple of that on.
fn scale_words(block: u32, groups: u32, g: u32, row: u32) -> vec4<u32> {
  let height = (groups + SCALE_GROUPS - 1u) / SCALE_GROUPS;
  return textureLoad(ws, texel_at(height, g / SCALE_GROUPS, row));
}
#else
/// What holds the scales of a group.
fn scale_words(block: u32, groups: u32, g: u32, row: u32) -> vec4<u32> {
  let quad = (block * ((groups + SCALE_GROUPS - 1u) / SCALE_GROUPS) + g / SCALE_GROUPS) * 64u + row;
#ifdef SCALE_HALF
  return vec4(ws[quad * 2u + (g & 3u) / 2u], 0u, 0u, 0u);
#endif
#ifdef SCALE_PAIR
  return vec4(ws[quad * 4u + (g & 3u)], 0u, 0u, 0u);
#endif
#ifdef SCALE_K
  return ws[quad];
#endif
#ifdef SIXTHS
  return ws[quad];
#endif
}
#endif

/// (scale of elements 0..16, scale of elements 16..32, minimum): w = scale * q + minimum.
fn scales_in(s: vec4<u32>, g: u32) -> vec3<f32> {
#ifdef SCALE_HALF
#ifdef TEXELS
  let halves = unpack2x16float(select(s.x, s.y, (g & 2u) != 0u));
#else
  let halves = unpack2x16float(s.x);
#endif
  let scale = select(halves.x, halves.y, (g & 1u) == 1u);
#ifdef OFFSET
  return vec3(scale, scale, -${OFFSET}.0 * scale);
#else
  return vec3(scale, scale, 0.0);
#endif
#endif
#ifdef SCALE_PAIR
#ifdef TEXELS
  let half_quad = select(s.xy, s.zw, (g & 2u) != 0u);
  let pair = unpack2x16float(select(half_quad.x, half_quad.y, (g & 1u) == 1u));
#else
  let pair = unpack2x16float(s.x);
#endif
  return vec3(pair.x, pair.x, pair.y);
#endif
#ifdef SCALE_K
  let d = unpack2x16float(s.x);
  // The first four groups have their six bits whole; of the others the upper two lie above those.
  let is_upper = (g & 4u) != 0u;
  let scales = select(s.y & 0x3f3f3f3fu, (s.w & 0x0f0f0f0fu) | ((s.y >> 2u) & 0x30303030u), is_upper);
  let minimums = select(s.z & 0x3f3f3f3fu, ((s.w >> 4u) & 0x0f0f0f0fu) | ((s.z >> 2u) & 0x30303030u), is_upper);
  let shift = (g & 3u) * 8u;
  let scale = d.x * f32((scales >> shift) & 0xffu);
  return vec3(scale, scale, -(d.y * f32((minimums >> shift) & 0xffu)));
#endif
#ifdef SIXTHS
  let d = unpack2x16float(s.z).x;
  let pair = select(s.x, s.y, (g & 2u) != 0u) >> ((g & 1u) * 16u);
  let low = f32(bitcast<i32>(pair << 24u) >> 24u);
  let high = f32(bitcast<i32>(pair << 16u) >> 24u);
  return vec3(d * low, d * high, 0.0);
#endif
}

fn group_scales(block: u32, groups: u32, g: u32, row: u32) -> vec3<f32> {
  return scales_in(scale_words(block, groups, g, row), g);
}

#else

/// Two f16 or bf16 in a word.
fn two_floats(word: u32) -> vec2<f32> {
#ifdef BRAINS
  return vec2(bitcast<f32>(word << 16u), bitcast<f32>(word & 0xffff0000u));
#else
  return unpack2x16float(word);
#endif
}
#endif
