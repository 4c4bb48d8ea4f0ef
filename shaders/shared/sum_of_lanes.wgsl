// A sum over the lanes of a workgroup that is no subgroup.

var<workgroup> partial: array<f32, ${SG}>;

/// The sum over all lanes; every lane of the workgroup must call it.
fn sum_of_lanes(lane: u32, value: f32) -> f32 {
  workgroupBarrier();
  partial[lane] = value;
#for step in 0..6
#let reach = (step == 0) * 32 + (step == 1) * 16 + (step == 2) * 8 + (step == 3) * 4 + (step == 4) * 2 + (step == 5)
  workgroupBarrier();
  if lane < ${reach}u {
    partial[lane] += partial[lane + ${reach}u];
  }
#end
  workgroupBarrier();
  return partial[0];
}
