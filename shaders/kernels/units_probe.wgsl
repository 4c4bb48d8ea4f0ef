// A product of small integers by cooperative matrices, which any order of sums gives exactly: whether they multiply what
// they should, with rows and columns where they should be.
// w[n, k] = (7 n + 3 k) % 11 - 5, x[t, k] = (5 k + 2 t + 1) % 13 - 6; columns 32.. of k in a second pass.
// Grid: 1 workgroup.
//
// Defines: T, SG (shared/units.wgsl); SUBGROUP.
enable f16;
enable wgpu_cooperative_matrix;
#import units

@group(0) @binding(0) var<storage, read_write> seen: array<f32>; // [32 tokens][64 rows]

fn w_quad(n: u32, k: u32) -> vec4<f32> {
  return vec4<f32>((vec4(7u * n) + 3u * (vec4(k) + vec4(0u, 1u, 2u, 3u))) % vec4(11u)) - vec4(5.0);
}

fn x_quad(t: u32, k: u32) -> vec4<f32> {
  return vec4<f32>((vec4(2u * t + 1u) + 5u * (vec4(k) + vec4(0u, 1u, 2u, 3u))) % vec4(13u)) - vec4(6.0);
}

@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) idx: u32, @builtin(subgroup_id) subgroup: u32) {
#for i in 0..SG / T
#for j in 0..32 / T
  var sum${i}_${j}: Sums;
#end
#end
  for (var g = 0u; g < 2u; g++) {
    for (var q = 0u; q < 32u; q += 4u) {
      put_weights(idx * PITCH + q, w_quad(idx, g * 32u + q));
    }
    for (var q = idx % 2u * 16u; q < idx % 2u * 16u + 16u; q += 4u) {
      put_rows(idx / 2u * PITCH + q, x_quad(idx / 2u, g * 32u + q));
    }
    workgroupBarrier();
#import units_multiply
    workgroupBarrier();
  }
#import units_store
  workgroupBarrier();
  for (var item = idx; item < 2048u; item += 64u) {
    seen[item] = sums[item];
  }
}
