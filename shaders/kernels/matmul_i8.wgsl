// y[t, n] (+)= sum over k of x[t, k] * w[n, k] + bias[n], with w in groups of 32 quantised weights and x quantised to i8.
//
// Each group is an exact integer dot product, scaled and added to one f32 accumulator in ascending order: the bits of
// y[t, n] depend on row n and token t alone, not on the tile (R rows of a lane, C tokens, UNROLL groups).
//
// A lane owns R rows of a block of 64. With subgroups the lanes load different activations and spread them by
// broadcasts of constant index; without, every lane reads them all.
// Grid: for each R * SG rows, for each C tokens (fastest). R * SG divides 64.
//
// Defines: the weights' format (kernels/pack.rs): NIBBLES or BYTES, FIFTHS or SIXTHS for upper bits, SCALE_HALF,
// SCALE_PAIR or SCALE_K, OFFSET = what is taken from each q, HAS_MINIMUM if the group adds something; R, C, UNROLL (1 or 4; SCALE_K and SIXTHS need 4);
// SG, SUBGROUP; PAIRS multiplies two 4-bit weights at once, where dot4I8Packed is many instructions.
#import grid
#import step
#import unpack
#ifdef PAIRS
#import pairs
#else
#import dot8
#endif

struct Params {
  n: u32,             // rows of w in this slice
  groups: u32,        // of 32, along k
  x_stride: u32,      // granules of 16 activations from row to row of x
  y_stride: u32,      // elements from row to row of y
  y_offset: u32,
  counts_logits: u32, // 1: x has a row per logit row; 0: per token
  accumulate: u32,    // 1: adds to y
  has_bias: u32,
}

@group(0) @binding(0) var<storage, read> step_meta: array<u32>;
@group(0) @binding(1) var<storage, read> xq: array<vec4<u32>>; // [m, x_stride], 16 x i8
@group(0) @binding(2) var<storage, read> xs: array<vec2<f32>>; // [m, x_stride / 2], (scale, scale * sum of q)
@group(0) @binding(3) var<storage, read> wq: array<vec4<u32>>; // [n / 64, granules, 64]
#ifdef FIFTHS
@group(0) @binding(4) var<storage, read> wh: array<u32>; // [n / 64, groups, 64]
#endif
#ifdef SIXTHS
@group(0) @binding(4) var<storage, read> wh: array<vec2<u32>>; // [n / 64, groups, 64]
#endif
#ifdef SCALE_HALF
#if UNROLL == 1
@group(0) @binding(5) var<storage, read> ws: array<u32>; // [n / 64, groups / 4, 64, 2], two f16 scales
#else
@group(0) @binding(5) var<storage, read> ws: array<vec2<u32>>; // [n / 64, groups / 4, 64], four f16 scales
#endif
#endif
#ifdef SCALE_PAIR
#if UNROLL == 1
@group(0) @binding(5) var<storage, read> ws: array<u32>; // [n / 64, groups / 4, 64, 4], f16 scale and minimum
#else
@group(0) @binding(5) var<storage, read> ws: array<vec4<u32>>; // [n / 64, groups / 4, 64], four of them
#endif
#endif
#ifdef SCALE_K
@group(0) @binding(5) var<storage, read> ws: array<vec4<u32>>; // [n / 64, groups / 8, 64], f16 d and dmin, 12 bytes
#endif
#ifdef SIXTHS
@group(0) @binding(5) var<storage, read> ws: array<vec4<u32>>; // [n / 64, groups / 4, 64], 8 x i8, f16 d
#endif
@group(0) @binding(6) var<storage, read> biases: array<f32>; // [n], read if has_bias
@group(0) @binding(7) var<storage, read_write> y: array<f32>; // [m, y_stride]
@group(0) @binding(8) var<uniform> params: Params;

@compute @workgroup_size(${SG})
fn main(
  @builtin(workgroup_id) group_id: vec3<u32>,
#ifdef SUBGROUP
  @builtin(subgroup_invocation_id) lane: u32,
#else
  @builtin(local_invocation_index) lane: u32,
#endif
) {
  let m = select(num_tokens(), num_logits(), params.counts_logits == 1u);
  if m == 0u {
    return;
  }
  let num_tiles = (m + ${C - 1}u) / ${C}u;
  let workgroup = linear_workgroup(group_id);
  let first_row = (workgroup / num_tiles) * ${R * SG}u;
  let first_token = (workgroup % num_tiles) * ${C}u;
  if first_row >= params.n {
    return;
  }
  // Rows are stored in blocks of 64, which this workgroup does not cross.
  let block = first_row / 64u;
  let row = first_row % 64u + lane;
  let groups = params.groups;
  let quads = (groups + 3u) / 4u;
  let full_groups = groups - groups % ${UNROLL}u;
#for r in 0..R
#for c in 0..C
  var acc${r}_${c} = 0.0;
#end
#end

#for tail in 0..2
#if tail == 0 || UNROLL > 1
#let U = UNROLL - tail * (UNROLL - 1)
#ifdef SUBGROUP
  // Load h of lane l takes granule i % 2U of token i / 2U, for i = h * SG + l.
#for h in 0..(C * U * 2 + SG - 1) / SG
  let x_item${tail}_${h} = (${h * SG}u + lane) % ${C * U * 2}u;
  let x_base${tail}_${h} = min(first_token + x_item${tail}_${h} / ${U * 2}u, m - 1u) * params.x_stride + x_item${tail}_${h} % ${U * 2}u;
#end
#for h in 0..(C * U + SG - 1) / SG
  let s_item${tail}_${h} = (${h * SG}u + lane) % ${C * U}u;
  let s_base${tail}_${h} = min(first_token + s_item${tail}_${h} / ${U}u, m - 1u) * (params.x_stride / 2u) + s_item${tail}_${h} % ${U}u;
#end
#endif
#if tail == 0
  for (var g = 0u; g < full_groups; g += ${U}u) {
#else
  for (var g = full_groups; g < groups; g++) {
#endif
#ifdef SUBGROUP
#for h in 0..(C * U * 2 + SG - 1) / SG
    let x_load${h} = xq[x_base${tail}_${h} + g * 2u];
#ifdef PAIRS
    let x_even${h} = even_pairs(x_load${h});
    let x_odd${h} = odd_pairs(x_load${h});
#endif
#end
#for h in 0..(C * U + SG - 1) / SG
    let s_load${h} = xs[s_base${tail}_${h} + g];
#end
#endif
#for c in 0..C
#for u in 0..U
#ifdef SUBGROUP
#for half in 0..2
#let i = c * U * 2 + u * 2 + half
#ifdef PAIRS
    let xe${c}_${u}_${half} = subgroupBroadcast(x_even${i / SG}, ${i % SG}u);
    let xo${c}_${u}_${half} = subgroupBroadcast(x_odd${i / SG}, ${i % SG}u);
#else
    let x${c}_${u}_${half} = subgroupBroadcast(x_load${i / SG}, ${i % SG}u);
#endif
#end
#let i = c * U + u
    let sx${c}_${u} = subgroupBroadcast(s_load${i / SG}, ${i % SG}u);
#else
    let t${c}_${u} = min(first_token + ${c}u, m - 1u) * params.x_stride + (g + ${u}u) * 2u;
#for half in 0..2
#ifdef PAIRS
    let xe${c}_${u}_${half} = even_pairs(xq[t${c}_${u} + ${half}u]);
    let xo${c}_${u}_${half} = odd_pairs(xq[t${c}_${u} + ${half}u]);
#else
    let x${c}_${u}_${half} = xq[t${c}_${u} + ${half}u];
#endif
#end
    let sx${c}_${u} = xs[t${c}_${u} / 2u];
#endif
#end
#end
#for r in 0..R
    {
      let r_idx = row + ${r * SG}u;
#ifdef SCALE_K
      let s_words = ws[(block * (groups / 8u) + g / 8u) * 64u + r_idx];
      let k_words = k_scales(s_words, (g & 4u) != 0u);
      let k_dm = unpack2x16float(s_words.x);
#else
      let s_at = (block * quads + g / 4u) * 64u + r_idx;
#if UNROLL > 1
      let s_words = ws[s_at];
#endif
#endif
#for u in 0..U
      {
#if U > 1
        let quarter = ${u}u;
#else
        let quarter = g & 3u;
#endif
        let at = (block * groups + g + ${u}u) * 64u + r_idx;

        // The group's scale, and what it adds for each unit of the activations' sum.
#ifdef SCALE_HALF
#if UNROLL == 1
        let scale = half_of(ws[s_at * 2u + quarter / 2u], quarter & 1u);
#else
        let scale = half_of(s_words[quarter / 2u], quarter & 1u);
#endif
#endif
#ifdef SCALE_PAIR
#if UNROLL == 1
        let scale_minimum = unpack2x16float(ws[s_at * 4u + quarter]);
#else
        let scale_minimum = unpack2x16float(s_words[quarter]);
#endif
        let scale = scale_minimum.x;
        let minimum = scale_minimum.y;
#endif
#ifdef SCALE_K
        let scale = k_dm.x * byte_of(k_words.x, quarter);
        let minimum = -(k_dm.y * byte_of(k_words.y, quarter));
#endif
#ifdef OFFSET
        let minimum = -${OFFSET}.0 * scale;
#endif
#ifdef SIXTHS
        let scale = unpack2x16float(s_words.z).x;
        let half_scales = s_words[quarter / 2u] >> ((quarter & 1u) * 16u);
        let low_scale = signed_byte_of(half_scales, 0u);
        let high_scale = signed_byte_of(half_scales, 1u);
#endif

        // The group's elements: 0..16 and 16..32.
#ifdef BYTES
        let low = wq[(block * groups + g + ${u}u) * 128u + r_idx];
        let high = wq[(block * groups + g + ${u}u) * 128u + 64u + r_idx];
#else
        let q = wq[at];
#ifdef PAIRS
        let low_even = q & PAIR_MASK;
        let low_odd = (q >> vec4(8u)) & PAIR_MASK;
        let high_even = (q >> vec4(4u)) & PAIR_MASK;
        let high_odd = (q >> vec4(12u)) & PAIR_MASK;
#else
#ifdef FIFTHS
        let h = wh[at];
        let low = low_nibbles(q) | low_fifths(h);
        let high = high_nibbles(q) | high_fifths(h);
#else
#ifdef SIXTHS
        let h = wh[at];
        let low = sixes(low_nibbles(q), h.x);
        let high = sixes(high_nibbles(q), h.y);
#else
        let low = low_nibbles(q);
        let high = high_nibbles(q);
#endif
#endif
#endif
#endif

#for c in 0..C
        {
#ifdef PAIRS
          let dot = dot_pairs(low_even, xe${c}_${u}_0, low_odd, xo${c}_${u}_0)
            + dot_pairs(high_even, xe${c}_${u}_1, high_odd, xo${c}_${u}_1);
#else
#ifdef SIXTHS
          let dot = low_scale * dot_bytes(low, x${c}_${u}_0) + high_scale * dot_bytes(high, x${c}_${u}_1);
#else
          let dot = dot_bytes(low, x${c}_${u}_0) + dot_bytes(high, x${c}_${u}_1);
#endif
#endif
#ifdef HAS_MINIMUM
          acc${r}_${c} = fma(minimum, sx${c}_${u}.y, acc${r}_${c});
#endif
          acc${r}_${c} = fma(scale, sx${c}_${u}.x * f32(dot), acc${r}_${c});
        }
#end
      }
#end
    }
#end
  }
#endif
#end

#for r in 0..R
  {
    let n = first_row + ${r * SG}u + lane;
    if n < params.n {
      var offset = 0.0;
      if params.has_bias == 1u {
        offset = biases[n];
      }
#for c in 0..C
      if first_token + ${c}u < m {
        let at = (first_token + ${c}u) * params.y_stride + params.y_offset + n;
        var value = acc${r}_${c} + offset;
        if params.accumulate == 1u {
          value += y[at];
        }
        y[at] = value;
      }
#end
    }
  }
#end
}
