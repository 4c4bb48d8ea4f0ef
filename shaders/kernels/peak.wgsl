// Multiply-adds in registers and nothing else: how fast an adapter is at them. Eight independent chains in a lane, so that
// the time of one does not show.
// Grid: as many workgroups as y has room for.
//
// Defines: SG, SUBGROUP (not used: no lane looks at another).
#import grid

struct Params {
  rounds: u32, // of 32 multiply-adds in a lane
  factor: f32,
}

@group(0) @binding(0) var<storage, read_write> y: array<f32>; // [workgroups, SG]
@group(0) @binding(1) var<uniform> params: Params;

@compute @workgroup_size(${SG})
fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let item = linear_workgroup(group_id) * ${SG}u + lane;
  let start = f32(lane) * params.factor;
#for i in 0..8
  var a${i} = start + ${i}.0;
#end
  for (var round = 0u; round < params.rounds; round++) {
#for j in 0..4
#for i in 0..8
    a${i} = fma(a${i}, params.factor, start);
#end
#end
  }
  y[item] = a0 + a1 + a2 + a3 + a4 + a5 + a6 + a7;
}
