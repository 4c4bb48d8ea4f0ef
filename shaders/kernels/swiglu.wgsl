// y[t, i] = silu(gate[t, i]) * up[t, i], silu(g) = g / (1 + exp(-g)), as f32 or as i8 with scales.
//
// Grid: a lane for each (token, group of 32), WG lanes in a workgroup.
//
// Defines: WG; OUT_F32, OUT_I8.
#import grid
#import step
#ifdef OUT_I8
#import quantise
#endif

struct Params {
  groups: u32, // of 32 in a row of the result, padding included
}

@group(0) @binding(0) var<storage, read> step_meta: array<u32>;
@group(0) @binding(1) var<storage, read> gate_up: array<vec4<f32>>; // [num_tokens, 2, groups * 8], padding is zero
#ifdef OUT_F32
@group(0) @binding(2) var<storage, read_write> y: array<vec4<f32>>; // [num_tokens, groups * 8]
#endif
#ifdef OUT_I8
@group(0) @binding(3) var<storage, read_write> yq: array<vec4<u32>>; // [num_tokens, groups * 2]
@group(0) @binding(4) var<storage, read_write> ys: array<vec2<f32>>; // [num_tokens, groups]
#endif
@group(0) @binding(5) var<uniform> params: Params;

/// Clamped so that no intermediate overflows: at 80 the result is zero in f32 anyway.
fn silu(v: vec4<f32>) -> vec4<f32> {
  return v / (1.0 + exp(min(-v, vec4<f32>(80.0))));
}

@compute @workgroup_size(${WG})
fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let idx = linear_workgroup(group_id) * ${WG}u + lane;
  let groups = params.groups;
  if idx >= num_tokens() * groups {
    return;
  }
  let token = idx / groups;
  let gate_at = (token * groups * 2u + idx % groups) * 8u;
  let up_at = gate_at + groups * 8u;
#for i in 0..8
  let v${i} = silu(gate_up[gate_at + ${i}u]) * gate_up[up_at + ${i}u];
#end
#ifdef OUT_F32
#for i in 0..8
  y[idx * 8u + ${i}u] = v${i};
#end
#endif
#ifdef OUT_I8
  let q = quantise(v0, v1, v2, v3, v4, v5, v6, v7);
  yq[idx * 2u] = q.low;
  yq[idx * 2u + 1u] = q.high;
  ys[idx] = q.scale;
#endif
}
