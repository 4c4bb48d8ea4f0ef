// From the fused projection to attention's inputs: RMSNorm of each q and k head (QK_NORM), rotary embedding, q scaled
// for a base-2 softmax, k and v into their slots of the paged cache.
// A lane owns a whole head of a token, so it writes whole words and sums squares in order of the dims.
// Values that are not finite enter the cache as 0, others within what f16 holds: a broken row cannot reach its
// neighbours through masked keys. (The row itself still shows: its q is not finite.)
// KV_I8: scale = max |x| / 127 of the head, in a word of its own behind the block's values.
// Grid: ceil(num_tokens * (num_heads + 2 * num_kv_heads) / workgroup size) workgroups.
#import grid
#import step
#ifdef KV_TEXELS
#import kv_texels
#endif

struct Params {
  num_heads: u32,
  num_kv_heads: u32,
  qkv_stride: u32,
  q_stride: u32,
  q_scale: f32,
  rms_eps: f32,
  group: u32, // of layers: whose slots
}

@group(0) @binding(0) var<storage, read> step_meta: array<u32>;
@group(0) @binding(1) var<storage, read> qkv: array<vec2<f32>>; // [num_tokens, qkv_stride / 2]: q heads, k heads, v heads
@group(0) @binding(2) var<storage, read> rope: array<vec2<f32>>; // [max_position, ROT / 2]: (cos, sin)
#ifdef QK_NORM
@group(0) @binding(3) var<storage, read> gains: array<vec2<f32>>; // [2, D / 2]: of q, of k
#endif
@group(0) @binding(4) var<storage, read_write> q: array<vec2<f32>>; // [num_tokens, q_stride / 2]: heads of DP dims
#ifdef KV_TEXELS
@group(0) @binding(5) var k_cache: texture_storage_2d<rgba32uint, write>; // [num_blocks, num_kv_heads, block_size, DP / 8]
@group(0) @binding(6) var v_cache: texture_storage_2d<rgba32uint, write>;
#else
#ifdef KV_F32
@group(0) @binding(5) var<storage, read_write> k_cache: array<vec2<f32>>; // [num_blocks, num_kv_heads, block_size, DP / 2]
@group(0) @binding(6) var<storage, read_write> v_cache: array<vec2<f32>>;
#else
// [num_blocks, num_kv_heads, block_size, DP / 2], or for i8 DP / 4 and behind each block its scales
@group(0) @binding(5) var<storage, read_write> k_cache: array<u32>;
@group(0) @binding(6) var<storage, read_write> v_cache: array<u32>;
#endif
#endif
@group(0) @binding(7) var<uniform> params: Params;

fn finite_or_zero(x: f32) -> f32 {
  return select(x, 0.0, (bitcast<u32>(x) & 0x7f800000u) == 0x7f800000u);
}

#ifdef KV_F32
fn cached(x: vec2<f32>) -> vec2<f32> {
  return vec2(finite_or_zero(x.x), finite_or_zero(x.y));
}
#else
#ifdef KV_I8
fn cached(x: vec2<f32>) -> vec2<f32> {
  return vec2(finite_or_zero(x.x), finite_or_zero(x.y));
}
#else
fn cached(x: vec2<f32>) -> u32 {
  return pack2x16float(clamp(vec2(finite_or_zero(x.x), finite_or_zero(x.y)), vec2(-65504.0), vec2(65504.0)));
}
#endif
#endif

/// One head of a token.
struct Head {
  source: u32, // in qkv
  rope_from: u32,
  gain_from: u32,
  norm: f32, // 1 / RMS
  scale: f32, // of q for the softmax
  is_v: bool,
}

/// Dims 2i and 2i + 1; dims beyond D are padding, dims beyond ROT and v heads do not turn.
fn turned(head: Head, i: u32) -> vec2<f32> {
  let inside = i < ${D / 2}u;
  let at = min(i, ${D / 2 - 1}u);
  let turns = i < ${ROT / 2}u && !head.is_v;
#ifdef INTERLEAVED
  let partner_at = at;
  let angle = rope[head.rope_from + min(i, ${ROT / 2 - 1}u)];
  let cosine = select(vec2(1.0), vec2(angle.x), turns);
  let sine = select(vec2(0.0), vec2(-angle.y, angle.y), turns);
#else
  let upper = i >= ${ROT / 4}u;
  let partner_at = select(at, select(i + ${ROT / 4}u, i - ${ROT / 4}u, upper), turns);
  let pair = min(select(2u * i, 2u * i - ${ROT / 2}u, upper), ${ROT / 2 - 2}u);
  let angle_0 = rope[head.rope_from + pair];
  let angle_1 = rope[head.rope_from + pair + 1u];
  let sign = select(-1.0, 1.0, upper);
  let cosine = select(vec2(1.0), vec2(angle_0.x, angle_1.x), turns);
  let sine = select(vec2(0.0), vec2(angle_0.y, angle_1.y) * sign, turns);
#endif
  var x = qkv[head.source + at] * head.norm;
  var partner = qkv[head.source + partner_at] * head.norm;
#ifdef QK_NORM
  x *= select(gains[head.gain_from + at], vec2(1.0), head.is_v);
  partner *= select(gains[head.gain_from + partner_at], vec2(1.0), head.is_v);
#endif
#ifdef INTERLEAVED
  partner = partner.yx;
#endif
  return select(vec2(0.0), fma(x, cosine, partner * sine) * head.scale, inside);
}

@compute @workgroup_size(${WG})
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let num_heads = params.num_heads + 2u * params.num_kv_heads;
  let item = linear_workgroup(group) * ${WG}u + lane;
  let token = item / num_heads;
  if token >= num_tokens() {
    return;
  }
  let head_idx = item % num_heads;
  let is_q = head_idx < params.num_heads;
  let is_v = head_idx >= params.num_heads + params.num_kv_heads;
  let kv_head = (head_idx - params.num_heads) % params.num_kv_heads; // of k and v heads
  let source = (token * params.qkv_stride + head_idx * ${D}u) / 2u;

  var norm = 1.0;
#ifdef QK_NORM
  var sum = 0.0;
  for (var i = 0u; i < ${D / 2}u; i++) {
    let x = qkv[source + i];
    sum = fma(x.x, x.x, sum);
    sum = fma(x.y, x.y, sum);
  }
  norm = inverseSqrt(sum / ${D}.0 + params.rms_eps);
  norm = select(norm, 1.0, is_v);
#endif
  let gain_from = select(0u, ${D / 2}u, !is_q);
  let q_scale = select(1.0, params.q_scale, is_q);
  let head = Head(source, position(token) * ${ROT / 2}u, gain_from, norm, q_scale, is_v);

  let slot = kv_slot(token, params.group);
  let size = block_size();
  let q_to = (token * params.q_stride + head_idx * ${DP}u) / 2u;
#ifdef KV_I8
  if is_q {
    for (var i = 0u; i < ${DP / 2}u; i++) {
      q[q_to + i] = turned(head, i);
    }
    return;
  }
  var largest = 0.0;
  for (var i = 0u; i < ${DP / 2}u; i++) {
    let y = abs(cached(turned(head, i)));
    largest = max(largest, max(y.x, y.y));
  }
  // A head of zeros stays zero; the smallest normal number keeps the quotient finite.
  let to_q = select(0.0, 127.0 / largest, largest > 1.2e-38);
  let rows = params.num_kv_heads * size;
  let block = (slot / size) * ((rows * ${DP / 4 + 1}u + 3u) & 0xfffffffcu);
  let row = kv_head * size + slot % size;
  for (var i = 0u; i < ${DP / 4}u; i++) {
    let y = vec4(cached(turned(head, 2u * i)), cached(turned(head, 2u * i + 1u)));
    let word = pack4xI8(vec4<i32>(round(y * to_q)));
    if is_v {
      v_cache[block + row * ${DP / 4}u + i] = word;
    } else {
      k_cache[block + row * ${DP / 4}u + i] = word;
    }
  }
  let scale = bitcast<u32>(largest / 127.0);
  if is_v {
    v_cache[block + rows * ${DP / 4}u + row] = scale;
  } else {
    k_cache[block + rows * ${DP / 4}u + row] = scale;
  }
#else
  let cache_row = ((slot / size) * params.num_kv_heads + kv_head) * size + slot % size;
#ifdef KV_TEXELS
  for (var i = 0u; i < ${DP / 8}u; i++) {
#for j in 0..4
    let y_${j} = turned(head, 4u * i + ${j}u);
#end
    let granule = vec4(cached(y_0), cached(y_1), cached(y_2), cached(y_3));
    let at = texel_of(cache_row * ${DP / 8}u + i);
    if is_q {
#for j in 0..4
      q[q_to + 4u * i + ${j}u] = y_${j};
#end
    } else if is_v {
      textureStore(v_cache, at, granule);
    } else {
      textureStore(k_cache, at, granule);
    }
  }
#else
  for (var i = 0u; i < ${DP / 2}u; i++) {
    let y = turned(head, i);
    if is_q {
      q[q_to + i] = y;
    } else if is_v {
      v_cache[cache_row * ${DP / 2}u + i] = cached(y);
    } else {
      k_cache[cache_row * ${DP / 2}u + i] = cached(y);
    }
  }
#endif
#endif
}
