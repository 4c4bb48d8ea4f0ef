// Packed weights read back; kernels/pack.rs describes the planes and sets the defines. The kernel file declares
//   wq: array<Granule>, wh: array<HighBits> if HAS_HIGH, ws: array<Scales> if QUANTISED,
// or, with TEXELS, imports weight_planes, whose textures hold the same; main then calls open_planes(block) first.
// A block is 64 rows; `row` counts within it. `groups` is the number of groups of 32 along k.

#ifdef TWOS
/// Bits 8b + 2i of word i / 4 are the lower two bits of element 4i + b.
alias Granule = vec2<u32>;
#else
alias Granule = vec4<u32>;
#endif

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
fn granule(block: u32, granules: u32, i: u32, row: u32) -> Granule {
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
#ifdef THIRDS
/// Bit 8b + i is bit 2 of element 4i + b.
alias HighBits = u32;
#endif
#ifdef SIXTHS
/// Bits 8b + 2i of word i / 4 are bits 4 and 5 of element 4i + b.
alias HighBits = vec2<u32>;
#endif
#ifdef SCALE_K
/// f16 d and dmin; 12 bytes of 6-bit scales and minimums of 8 groups.
alias Scales = vec4<u32>;
#else
#ifdef SCALE_SIXTHS
/// 8 x i8 scales of 16 elements; f16 d.
alias Scales = vec4<u32>;
#else
#ifdef SCALE_FLOATS
/// Scale and minimum of SCALE_FLOATS groups.
alias Scales = vec2<f32>;
#else
/// SCALE_HALF: two f16 scales. SCALE_PAIR: f16 scale and minimum. SCALE_TWO_HALVES: f16 scales of 16 elements each.
/// SCALE_POWERS: four exponents. SCALE_Q2, SCALE_SIXTEENS, SCALE_THIRTY_TWOS: 5, 5 and 3 words for 8 groups.
alias Scales = u32;
#endif
#endif
#endif

/// 32 elements as signed bytes: 0..16 and 16..32.
struct Elements { low: vec4<u32>, high: vec4<u32> }

const NIBBLE_MASK: vec4<u32> = vec4<u32>(0x0f0f0f0fu);
const ONES: vec4<u32> = vec4<u32>(0x01010101u);
const TOPS: vec4<u32> = vec4<u32>(0x80808080u);

/// x - y in each byte, for x and y below 128: the top bit keeps a borrow within its byte.
fn minus_bytes(x: vec4<u32>, y: vec4<u32>) -> vec4<u32> {
  return ((x | TOPS) - y) ^ TOPS;
}

/// -x where `signs` has a 1 in the byte, else x; x is below 128.
fn signed_bytes(x: vec4<u32>, signs: vec4<u32>) -> vec4<u32> {
  return x ^ ((x ^ minus_bytes(vec4(0u), x)) & (signs * 0xffu));
}

#ifdef CODES_IQ4
/// -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113 by code; four bytes in a word.
fn iq4_bytes(code: vec4<u32>) -> vec4<u32> {
  let lower = select(vec4(0xbfad9881u), vec4(0xf6eaddcfu), (code & vec4(4u)) != vec4(0u));
  let upper = select(vec4(0x26190d01u), vec4(0x71594535u), (code & vec4(4u)) != vec4(0u));
  let four = select(lower, upper, (code & vec4(8u)) != vec4(0u));
  return (four >> ((code & vec4(3u)) * 8u)) & vec4(0xffu);
}
#endif

#ifdef CODES
/// What the code in each byte stands for, as a signed byte.
fn decoded(codes: vec4<u32>) -> vec4<u32> {
#ifdef CODES_IQ4
  return iq4_bytes(codes)
    | (iq4_bytes(codes >> vec4(8u)) << vec4(8u))
    | (iq4_bytes(codes >> vec4(16u)) << vec4(16u))
    | (iq4_bytes(codes >> vec4(24u)) << vec4(24u));
#endif
#ifdef CODES_FP4
  // 0 1 2 3 4 6 8 12, then their negatives.
  let low = codes & (ONES * 3u);
  let both = codes & (codes >> vec4(1u)) & ONES;
  let is_large = ((codes >> vec4(2u)) & ONES) * 0xffu;
  let magnitude = low + ((ONES * 4u + low + both * 2u) & is_large);
  return signed_bytes(magnitude, (codes >> vec4(3u)) & ONES);
#endif
#ifdef CODES_IQ3_XXS
  // 4 + 8m, but 62 for m = 7; then their negatives.
  let m = codes & (ONES * 7u);
  let is_last = m & (m >> vec4(1u)) & (m >> vec4(2u)) & ONES;
  return signed_bytes(ONES * 4u + m * 8u + is_last * 2u, (codes >> vec4(3u)) & ONES);
#endif
#ifdef CODES_IQ3_S
  return minus_bytes(codes * 2u, ONES * 15u);
#endif
#ifdef CODES_IQ2
  // 8 25 43
  let magnitude = ONES * 8u + (codes & ONES) * 17u + ((codes >> vec4(1u)) & ONES) * 35u;
  return signed_bytes(magnitude, (codes >> vec4(2u)) & ONES);
#endif
#ifdef CODES_IQ1
  // 1 7 9
  let magnitude = ONES + (codes & ONES) * 6u + ((codes >> vec4(1u)) & ONES) * 8u;
  return signed_bytes(magnitude, (codes >> vec4(2u)) & ONES);
#endif
}
#endif

fn group_elements(block: u32, groups: u32, g: u32, row: u32) -> Elements {
#ifdef BYTES
  return Elements(granule(block, groups * 2u, g * 2u, row), granule(block, groups * 2u, g * 2u + 1u, row));
#else
#ifdef TWOS
  let q = granule(block, groups, g, row);
  var low = (vec4(q.x) >> vec4(0u, 2u, 4u, 6u)) & (ONES * 3u);
  var high = (vec4(q.y) >> vec4(0u, 2u, 4u, 6u)) & (ONES * 3u);
#else
  let q = granule(block, groups, g, row);
  var low = q & NIBBLE_MASK;
  var high = (q >> vec4(4u)) & NIBBLE_MASK;
#endif
#ifdef FIFTHS
#ifdef TEXELS
  let h = textureLoad(wh, texel_at(groups, g, row)).x;
#else
  let h = wh[(block * groups + g) * 64u + row];
#endif
  low |= ((vec4(h) >> vec4(0u, 1u, 2u, 3u)) & ONES) << vec4(4u);
  high |= ((vec4(h) >> vec4(4u, 5u, 6u, 7u)) & ONES) << vec4(4u);
#endif
#ifdef THIRDS
  let h = wh[(block * groups + g) * 64u + row];
  low |= ((vec4(h) >> vec4(0u, 1u, 2u, 3u)) & ONES) << vec4(2u);
  high |= ((vec4(h) >> vec4(4u, 5u, 6u, 7u)) & ONES) << vec4(2u);
#endif
#ifdef SIXTHS
#ifdef TEXELS
  let h = textureLoad(wh, texel_at(groups, g, row)).xy;
#else
  let h = wh[(block * groups + g) * 64u + row];
#endif
  low = sixths(low, h.x);
  high = sixths(high, h.y);
#endif
#ifdef BIAS
  low = minus_bytes(low, ONES * ${BIAS}u);
  high = minus_bytes(high, ONES * ${BIAS}u);
#endif
#ifdef CODES
  return Elements(decoded(low), decoded(high));
#else
  return Elements(low, high);
#endif
#endif
}

#ifdef SIXTHS
/// Signed 6-bit elements from their nibbles and the word with their upper bits.
fn sixths(nibbles: vec4<u32>, h: u32) -> vec4<u32> {
  let upper = ((vec4(h) >> vec4(0u, 2u, 4u, 6u)) & (ONES * 3u)) << vec4(4u);
  return minus_bytes(nibbles | upper, ONES * 32u);
}
#endif

/// Four elements as floats.
fn element_floats(word: u32) -> vec4<f32> {
#ifdef EIGHTS
  // E4M3 moved to where f16 has the same bits is 2^-8 of its value.
  let first = ((word & 0x0080u) << 8u) | ((word & 0x007fu) << 7u);
  let second = ((word & 0x8000u) << 16u) | ((word & 0x7f00u) << 15u);
  let third = ((word >> 8u) & 0x8000u) | ((word >> 9u) & 0x3f80u);
  let fourth = (word & 0x80000000u) | ((word & 0x7f000000u) >> 1u);
  return vec4(unpack2x16float(first | second), unpack2x16float(third | fourth)) * 256.0;
#else
  return vec4<f32>(unpack4xI8(word));
#endif
}

#ifdef TWO_MINIMUMS
alias GroupScales = vec4<f32>;
#else
alias GroupScales = vec3<f32>;
#endif

/// The minimum of elements 16..32.
fn upper_minimum(scales: GroupScales) -> f32 {
#ifdef TWO_MINIMUMS
  return scales.w;
#else
  return scales.z;
#endif
}

fn signed_byte(word: u32, byte: u32) -> f32 {
  return f32(bitcast<i32>(word << (24u - 8u * byte)) >> 24u);
}

#ifdef TEXELS
#ifdef SCALE_K
const SCALE_GROUPS: u32 = 8u;
#else
const SCALE_GROUPS: u32 = 4u;
#endif

/// What holds the scales of a group and of its neighbours: SCALE_GROUPS of them, from a multiple of that on.
fn scale_texel(groups: u32, g: u32, row: u32) -> vec4<u32> {
  return textureLoad(ws, texel_at((groups + SCALE_GROUPS - 1u) / SCALE_GROUPS, g / SCALE_GROUPS, row));
}

/// As group_scales, from the texel that holds them.
fn scales_in(s: vec4<u32>, g: u32) -> GroupScales {
#else
/// (scale of elements 0..16, scale of elements 16..32, minimum): w = scale * q + minimum. With TWO_MINIMUMS the third is of
/// elements 0..16 and a fourth of the others.
fn group_scales(block: u32, groups: u32, g: u32, row: u32) -> GroupScales {
#endif
#ifdef SCALE_HALF
#ifdef TEXELS
  let halves = unpack2x16float(select(s.x, s.y, (g & 2u) != 0u));
#else
  let quad = (block * ((groups + 3u) / 4u) + g / 4u) * 64u + row;
  let halves = unpack2x16float(ws[quad * 2u + (g & 3u) / 2u]);
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
  let quad = (block * ((groups + 3u) / 4u) + g / 4u) * 64u + row;
  let pair = unpack2x16float(ws[quad * 4u + (g & 3u)]);
#endif
  return vec3(pair.x, pair.x, pair.y);
#endif
#ifdef SCALE_K
#ifndef TEXELS
  let s = ws[(block * (groups / 8u) + g / 8u) * 64u + row];
#endif
  let d = unpack2x16float(s.x);
  // The first four groups have their six bits whole; of the others the upper two lie above those.
  let is_upper = (g & 4u) != 0u;
  let scales = select(s.y & 0x3f3f3f3fu, (s.w & 0x0f0f0f0fu) | ((s.y >> 2u) & 0x30303030u), is_upper);
  let minimums = select(s.z & 0x3f3f3f3fu, ((s.w >> 4u) & 0x0f0f0f0fu) | ((s.z >> 2u) & 0x30303030u), is_upper);
  let shift = (g & 3u) * 8u;
  let scale = d.x * f32((scales >> shift) & 0xffu);
  return vec3(scale, scale, -(d.y * f32((minimums >> shift) & 0xffu)));
#endif
#ifdef SCALE_SIXTHS
#ifndef TEXELS
  let s = ws[(block * (groups / 4u) + g / 4u) * 64u + row];
#endif
  let d = unpack2x16float(s.z).x;
  let pair = select(s.x, s.y, (g & 2u) != 0u) >> ((g & 1u) * 16u);
  return vec3(d * signed_byte(pair, 0u), d * signed_byte(pair, 1u), 0.0);
#endif
#ifdef SCALE_Q2
  let first = (block * (groups / 8u) + g / 8u) * 320u + row;
  let d = unpack2x16float(ws[first + 256u]);
  let pair = ws[first + (g & 7u) / 2u * 64u] >> ((g & 1u) * 16u);
  let scales = d.x * vec2(f32(pair & 15u), f32((pair >> 8u) & 15u));
  let minimums = -(d.y * vec2(f32((pair >> 4u) & 15u), f32((pair >> 12u) & 15u)));
  return vec4(scales, minimums);
#endif
#ifdef SCALE_SIXTEENS
  let first = (block * (groups / 8u) + g / 8u) * 320u + row;
  let d = bitcast<f32>(ws[first + 256u]);
  let pair = ws[first + (g & 7u) / 2u * 64u] >> ((g & 1u) * 16u);
  return vec3(d * signed_byte(pair, 0u), d * signed_byte(pair, 1u), 0.0);
#endif
#ifdef SCALE_THIRTY_TWOS
  let first = (block * (groups / 8u) + g / 8u) * 192u + row;
  let scale = bitcast<f32>(ws[first + 128u]) * signed_byte(ws[first + (g & 7u) / 4u * 64u], g & 3u);
  return vec3(scale, scale, 0.0);
#endif
#ifdef SCALE_POWERS
  let quad = (block * ((groups + 3u) / 4u) + g / 4u) * 64u + row;
  let exponent = (ws[quad] >> ((g & 3u) * 8u)) & 0xffu;
  // Half of 2^(exponent - 127), since codes are doubled; the two smallest are subnormal.
  let scale = bitcast<f32>(select((exponent - 1u) << 23u, 0x00200000u << exponent, exponent < 2u));
  return vec3(scale, scale, 0.0);
#endif
#ifdef SCALE_TWO_HALVES
  return vec3(unpack2x16float(ws[(block * groups + g) * 64u + row]), 0.0);
#endif
#ifdef SCALE_FLOATS
  let pair = ws[(block * ((groups + ${SCALE_FLOATS - 1}u) / ${SCALE_FLOATS}u) + g / ${SCALE_FLOATS}u) * 64u + row];
  return vec3(pair.x, pair.x, pair.y);
#endif
}

#ifdef TEXELS
fn group_scales(block: u32, groups: u32, g: u32, row: u32) -> GroupScales {
  return scales_in(scale_texel(groups, g, row), g);
}
#endif

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
