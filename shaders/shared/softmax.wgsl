// Pieces of an online softmax in base 2.

/// Stands for minus infinity: drivers with fast math may assume that infinities do not occur.
const MASKED: f32 = -1e30;

/// 2^x for x <= 0: exactly 1 at 0 and exactly 0 far below, whatever the driver's exp2 does there. A tile without a
/// visible key therefore changes nothing, bit for bit.
fn exp2_neg(x: f32) -> f32 {
  return select(select(exp2(x), 0.0, x < -126.0), 1.0, x == 0.0);
}
