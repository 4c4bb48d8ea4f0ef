//! Which of the ways to compute a product ([`super::tile`]) or attention ([`super::attention_way`]) is fastest on this adapter.
//!
//! Guarantees: a way is chosen only if it gave the bits of the prior on made-up data, three times, without a NaN, where the
//! prior itself is near the CPU's `reference()`; any other is banned for that key, with the reason. A choice other than
//! the prior was at least 5 % faster. What was not measured in time keeps the prior and can be measured another time.
//!
//! Not attempted: ways that would change the order of a sum; other kernels; weights that rotate through
//! memory: a product that is repeated reads them from the last level of cache where they fit.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::attention_way::{AttentionKey, Way};
use super::tile::{ProductKey, Tile};
use super::weights::{PackedMatrix, WeightError};
use super::{Class, DeviceClass};
use crate::gpu::Gpu;

mod attention_trial;
pub mod decide;
pub mod table;
mod trial;

use attention_trial::AttentionTrial;
use decide::Decision;
use trial::Trial;

/// What a way is chosen for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TuneKey {
    Product(ProductKey),
    Attention(AttentionKey),
}

impl std::fmt::Display for TuneKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            TuneKey::Product(key) => key.fmt(f),
            TuneKey::Attention(key) => key.fmt(f),
        }
    }
}

/// One way, and what was found.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    pub way: String,
    /// Median time of a dispatch; `None` where it was not measured.
    pub us: Option<f64>,
    /// Why it must not be taken.
    pub ban: Option<String>,
}

/// What was found about a key.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    pub key: TuneKey,
    /// The prior first.
    pub candidates: Vec<Candidate>,
    pub chosen: String,
}

impl Outcome {
    /// The class's own way stays.
    pub fn is_prior(&self) -> bool {
        self.candidates.first().is_some_and(|prior| prior.way == self.chosen)
    }
}

/// Weights that were made up, by type and shape.
type MadeUp = HashMap<String, (PackedMatrix, Vec<u8>)>;

/// Measures the keys in turn until `budget` is spent, and calls `each` with what was found. Those of one way only are
/// not measured.
pub fn tune(gpu: &Gpu, keys: &[TuneKey], budget: Duration, each: &mut dyn FnMut(Outcome)) -> Result<(), WeightError> {
    let deadline = Instant::now() + budget;
    let is_late = &mut || Instant::now() > deadline;
    let (class, pairs) = (Class::of(gpu.caps()), DeviceClass::of(gpu.caps()).multiplies_pairs);
    let mut weights = MadeUp::new();
    for key in keys {
        if is_late() {
            return Ok(());
        }
        let (ways, decision) = match key {
            TuneKey::Product(key) => {
                let tiles = key.candidates(class, pairs);
                (texts(&tiles), of_product(gpu, key, &tiles, &mut weights, is_late)?)
            }
            TuneKey::Attention(key) => {
                let ways = key.candidates(class);
                (texts(&ways), of_attention(gpu, key, &ways, is_late)?)
            }
        };
        let Some(decision) = decision else { return Ok(()) };
        let chosen = ways[decision.chosen].clone();
        let found = ways.into_iter().zip(decision.us.iter().zip(decision.bans));
        let candidates = found.map(|(way, (&us, ban))| Candidate { way, us, ban }).collect();
        each(Outcome { key: *key, candidates, chosen });
    }
    Ok(())
}

fn texts(ways: &[impl ToString]) -> Vec<String> {
    ways.iter().map(ToString::to_string).collect()
}

fn of_product(
    gpu: &Gpu,
    key: &ProductKey,
    tiles: &[Tile],
    weights: &mut MadeUp,
    is_late: &mut dyn FnMut() -> bool,
) -> Result<Option<Decision>, WeightError> {
    if tiles.len() == 1 {
        return Ok(Some(Decision::only()));
    }
    let name = format!("{} {}x{}", key.format.dtype, key.n, key.k);
    if !weights.contains_key(&name) {
        weights.insert(name.clone(), trial::made_up_weights(gpu, key)?);
    }
    let (matrix, bytes) = &weights[&name];
    let mut trial = Trial::new(gpu, *key, matrix, bytes)?;
    Ok(decide::choose(tiles.len(), &mut trial.with(tiles), is_late))
}

fn of_attention(
    gpu: &Gpu,
    key: &AttentionKey,
    ways: &[Way],
    is_late: &mut dyn FnMut() -> bool,
) -> Result<Option<Decision>, WeightError> {
    if ways.len() == 1 {
        return Ok(Some(Decision::only()));
    }
    let mut trial = AttentionTrial::new(gpu, *key)?;
    Ok(decide::choose(ways.len(), &mut trial.with(ways), is_late))
}
