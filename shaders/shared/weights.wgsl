// Packed weights read back; kernels/pack.rs describes the planes and sets the defines. The kernel file declares
//   wq: array<vec4<u32>>, wh: array<HighBits> if HAS_HIGH, ws: array<Scales> if QUANTISED.
// A block is 64 rows; `row` counts within it. `groups` is the number of groups of 32 along k.

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
  let group = block * groups + g;
#ifdef BYTES
  return Elements(wq[group * 128u + row], wq[group * 128u + 64u + row]);
#else
  let q = wq[group * 64u + row];
  let low = q & NIBBLE_MASK;
  let high = (q >> vec4(4u)) & NIBBLE_MASK;
#ifdef FIFTHS
  let h = wh[group * 64u + row];
  let ones = vec4(0x01010101u);
  return Elements(
    low | (((vec4(h) >> vec4(0u, 1u, 2u, 3u)) & ones) << vec4(4u)),
    high | (((vec4(h) >> vec4(4u, 5u, 6u, 7u)) & ones) << vec4(4u)),
  );
#else
#ifdef SIXTHS
  let h = wh[group * 64u + row];
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

/// (scale of elements 0..16, scale of elements 16..32, minimum): w = scale * q + minimum.
fn group_scales(block: u32, groups: u32, g: u32, row: u32) -> vec3<f32> {
#ifdef SCALE_HALF
  let quad = (block * ((groups + 3u) / 4u) + g / 4u) * 64u + row;
  let halves = unpack2x16float(ws[quad * 2u + (g & 3u) / 2u]);
  let scale = select(halves.x, halves.y, (g & 1u) == 1u);
#ifdef OFFSET
  return vec3(scale, scale, -${OFFSET}.0 * scale);
#else
  return vec3(scale, scale, 0.0);
#endif
#endif
#ifdef SCALE_PAIR
  let quad = (block * ((groups + 3u) / 4u) + g / 4u) * 64u + row;
  let pair = unpack2x16float(ws[quad * 4u + (g & 3u)]);
  return vec3(pair.x, pair.x, pair.y);
#endif
#ifdef SCALE_K
  let s = ws[(block * (groups / 8u) + g / 8u) * 64u + row];
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
  let s = ws[(block * (groups / 4u) + g / 4u) * 64u + row];
  let d = unpack2x16float(s.z).x;
  let pair = select(s.x, s.y, (g & 2u) != 0u) >> ((g & 1u) * 16u);
  let low = f32(bitcast<i32>(pair << 24u) >> 24u);
  let high = f32(bitcast<i32>(pair << 16u) >> 24u);
  return vec3(d * low, d * high, 0.0);
#endif
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
