//! The choice between ways by measured times: what is measured is behind a trait, so that tests bring a clock of their own.
//!
//! A time is the difference between a run of 2n and one of n dispatches, so that submit and wait cancel out. Each round
//! takes the candidates in another order; medians count. The best one and the prior are then measured in turns (prior,
//! best, best, prior), and the prior gives way only if it loses by more than [`MIN_WIN`], in the medians and in the shortest
//! times: other work on the machine may hit one of the two alone.

/// Something whose ways can be checked and timed. Ways are numbered, 0 is the prior.
pub trait Measured {
    /// Whether a way gives what the prior gives; the error says what is wrong. The prior is asked first.
    fn check(&mut self, way: usize) -> Result<(), String>;

    /// Seconds from submit to the end of `count` dispatches.
    fn seconds(&mut self, way: usize, count: u32) -> Result<f64, String>;
}

/// What came out. The lists have an entry for each way.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// Median time of a dispatch.
    pub us: Vec<Option<f64>>,
    pub bans: Vec<Option<String>>,
    pub chosen: usize,
}

impl Decision {
    /// Of a key that has one way.
    pub fn only() -> Decision {
        Decision { us: vec![None], bans: vec![None], chosen: 0 }
    }
}

/// The prior keeps its place unless another way takes at most this share of its time.
pub const MIN_WIN: f64 = 0.95;
const ROUNDS: usize = 3;
/// About how long the shorter run of a time is.
const RUN_SECONDS: f64 = 1.5e-3;
const MAX_COUNT: f64 = 256.0;

/// Chooses among `num` ways; `None` when `is_late` said so before the end.
pub fn choose(num: usize, measured: &mut dyn Measured, is_late: &mut dyn FnMut() -> bool) -> Option<Decision> {
    let mut decision = Decision { us: vec![None; num], bans: vec![None; num], chosen: 0 };
    for way in 0..num {
        if is_late() {
            return None;
        }
        decision.bans[way] = measured.check(way).err();
        if decision.bans[0].is_some() {
            // Nothing to compare with.
            return Some(decision);
        }
    }
    let count = count_of(measured, &mut decision);
    let mut times = vec![Vec::new(); num];
    for round in 0..ROUNDS {
        for way in order(num, round as u64) {
            if is_late() {
                return None;
            }
            time(measured, &mut decision, way, count, &mut times);
        }
    }
    (0..num).for_each(|way| decision.us[way] = median(&times[way]).map(|s| s * 1e6));
    let best = (0..num).filter(|&way| decision.bans[way].is_none());
    let best =
        best.min_by(|&a, &b| decision.us[a].unwrap_or(f64::MAX).total_cmp(&decision.us[b].unwrap_or(f64::MAX)))?;
    if best == 0 || !wins(decision.us[best], decision.us[0]) {
        return Some(decision);
    }
    let mut finals = vec![Vec::new(); num];
    for _ in 0..ROUNDS {
        for way in [0, best, best, 0] {
            time(measured, &mut decision, way, count, &mut finals);
        }
    }
    for way in [0, best] {
        decision.us[way] = median(&finals[way]).map(|s| s * 1e6);
    }
    let least = |way: usize| finals[way].iter().copied().min_by(f64::total_cmp);
    let wins_both = wins(decision.us[best], decision.us[0]) && wins(least(best), least(0));
    if decision.bans[best].is_none() && wins_both {
        decision.chosen = best;
    }
    Some(decision)
}

fn wins(time: Option<f64>, of_prior: Option<f64>) -> bool {
    matches!((time, of_prior), (Some(time), Some(prior)) if time <= prior * MIN_WIN)
}

/// Dispatches of the shorter run, by a second run of the prior: the first one compiles on some drivers.
fn count_of(measured: &mut dyn Measured, decision: &mut Decision) -> u32 {
    match measured.seconds(0, 1).and_then(|_| measured.seconds(0, 1)) {
        Ok(one) => (RUN_SECONDS / one.max(1e-9)).clamp(1.0, MAX_COUNT) as u32,
        Err(fault) => {
            decision.bans[0] = Some(fault);
            1
        }
    }
}

/// Adds a time of a way to its list; a way that fails is banned.
fn time(measured: &mut dyn Measured, decision: &mut Decision, way: usize, count: u32, times: &mut [Vec<f64>]) {
    if decision.bans[way].is_some() {
        return;
    }
    let two = measured.seconds(way, count).and_then(|short| Ok((short, measured.seconds(way, 2 * count)?)));
    match two {
        Ok((short, long)) => times[way].push(difference(short, long) / f64::from(count)),
        Err(fault) => decision.bans[way] = Some(fault),
    }
}

/// Seconds of the n dispatches by which two runs differ. On a busy machine the difference may drown; half of the long time
/// is then the honest, slower figure.
pub fn difference(short: f64, long: f64) -> f64 {
    if long > 1.2 * short { long - short } else { long / 2.0 }
}

/// A permutation of `0..num`, another one for each seed (Fisher and Yates, by a linear congruence).
fn order(num: usize, seed: u64) -> Vec<usize> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut order: Vec<usize> = (0..num).collect();
    for i in (1..num).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        order.swap(i, ((state >> 33) % (i as u64 + 1)) as usize);
    }
    order
}

fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ways with a time of a dispatch each, on a clock with a cost of submitting.
    struct Fake {
        us: Vec<f64>,
        wrong: Vec<usize>,
        runs: usize,
    }

    impl Measured for Fake {
        fn check(&mut self, way: usize) -> Result<(), String> {
            if self.wrong.contains(&way) { Err("other bits".into()) } else { Ok(()) }
        }

        fn seconds(&mut self, way: usize, count: u32) -> Result<f64, String> {
            assert!(!self.wrong.contains(&way), "a banned way is not run for its time");
            self.runs += 1;
            Ok(300e-6 + self.us[way] * 1e-6 * f64::from(count))
        }
    }

    fn choice(us: &[f64], wrong: &[usize]) -> Decision {
        let mut fake = Fake { us: us.to_vec(), wrong: wrong.to_vec(), runs: 0 };
        choose(us.len(), &mut fake, &mut || false).expect("there is time")
    }

    #[test]
    fn the_fastest_way_wins_and_times_are_without_the_submit() {
        let decision = choice(&[100.0, 130.0, 60.0, 80.0], &[]);
        assert_eq!(decision.chosen, 2);
        for (us, want) in decision.us.iter().zip([100.0, 130.0, 60.0, 80.0]) {
            assert!((us.unwrap() - want).abs() < 1e-6, "{decision:?}");
        }
    }

    #[test]
    fn the_prior_stays_unless_it_loses_by_five_percent() {
        assert_eq!(choice(&[100.0, 96.0], &[]).chosen, 0);
        assert_eq!(choice(&[100.0, 94.0], &[]).chosen, 1);
        assert_eq!(choice(&[100.0], &[]).chosen, 0);
    }

    #[test]
    fn a_banned_way_is_never_chosen_however_fast() {
        let decision = choice(&[100.0, 1.0, 50.0], &[1]);
        assert_eq!((decision.chosen, decision.us[1]), (2, None));
        assert_eq!(decision.bans[1].as_deref(), Some("other bits"));
        let decision = choice(&[100.0, 1.0], &[0]);
        assert_eq!((decision.chosen, decision.us), (0, vec![None, None]), "a wrong prior is no measure");
    }

    #[test]
    fn a_way_that_is_fast_only_at_first_does_not_win() {
        struct Fading(Fake);
        impl Measured for Fading {
            fn check(&mut self, way: usize) -> Result<(), String> {
                self.0.check(way)
            }
            fn seconds(&mut self, way: usize, count: u32) -> Result<f64, String> {
                // The rounds take two runs of two ways each, thrice, after two for the size.
                let is_final = self.0.runs >= 2 + 12;
                let seconds = self.0.seconds(way, count)?;
                Ok(if is_final && way == 1 { 3.0 * seconds } else { seconds })
            }
        }
        let mut fading = Fading(Fake { us: vec![100.0, 50.0], wrong: vec![], runs: 0 });
        assert_eq!(choose(2, &mut fading, &mut || false).map(|d| d.chosen), Some(0));
    }

    #[test]
    fn a_prior_that_was_disturbed_in_most_of_its_runs_keeps_its_place() {
        struct Busy(Fake);
        impl Measured for Busy {
            fn check(&mut self, way: usize) -> Result<(), String> {
                self.0.check(way)
            }
            fn seconds(&mut self, way: usize, count: u32) -> Result<f64, String> {
                // Each time is of two runs; every fifth time is left in peace.
                let seconds = self.0.seconds(way, count)?;
                Ok(if way == 0 && !((self.0.runs - 1) / 2).is_multiple_of(5) { 2.0 * seconds } else { seconds })
            }
        }
        let mut busy = Busy(Fake { us: vec![100.0, 99.0], wrong: vec![], runs: 0 });
        assert_eq!(choose(2, &mut busy, &mut || false).map(|d| d.chosen), Some(0));
    }

    #[test]
    fn nothing_is_chosen_when_time_runs_out_and_rounds_differ_in_order() {
        let mut fake = Fake { us: vec![100.0, 10.0], wrong: vec![], runs: 0 };
        let mut calls = 0;
        let mut is_late = || {
            calls += 1;
            calls > 4
        };
        assert_eq!(choose(2, &mut fake, &mut is_late), None);
        let orders: Vec<Vec<usize>> = (0..3).map(|seed| order(6, seed)).collect();
        assert!(orders[0] != orders[1] && orders[1] != orders[2], "{orders:?}");
        for mut order in orders {
            order.sort_unstable();
            assert_eq!(order, [0, 1, 2, 3, 4, 5]);
        }
    }

    #[test]
    fn a_drowned_difference_counts_as_half_of_the_long_run() {
        assert_eq!(difference(1.0, 2.0), 1.0);
        assert_eq!(difference(1.0, 1.1), 0.55);
    }
}
