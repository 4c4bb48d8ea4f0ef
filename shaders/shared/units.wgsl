// Tiles for cooperative matrices: what a workgroup of 64 lanes multiplies in a pass over 32 columns of k. The kernel file
// enables f16 and wgpu_cooperative_matrix. Subgroup s has rows s * SG.. of the 64, and all 32 tokens.
//
// Defines: T, side of a matrix, 8 or 16; SG, lanes of a subgroup, a multiple of T that divides 64.

#if T == 8
alias Left = coop_mat8x8<f16, A>;
alias Right = coop_mat8x8<f16, B>;
alias Sums = coop_mat8x8<f32, C>;
#else
alias Left = coop_mat16x16<f16, A>;
alias Right = coop_mat16x16<f16, B>;
alias Sums = coop_mat16x16<f32, C>;
#endif

/// f16 from row to row of a tile: 32, and 8 that spread rows over the banks of the memory.
const PITCH: u32 = 40u;

var<workgroup> w_tile: array<f16, 2560>; // [64 rows][PITCH]
var<workgroup> x_tile: array<f16, 1280>; // [32 tokens][PITCH]
var<workgroup> sums: array<f32, 2048>;   // [32 tokens][64 rows]

fn put_weights(at: u32, v: vec4<f32>) {
#for c in 0..4
  w_tile[at + ${c}u] = f16(v[${c}]);
#end
}

fn put_rows(at: u32, v: vec4<f32>) {
#for c in 0..4
  x_tile[at + ${c}u] = f16(v[${c}]);
#end
}
