//! `kvasir bench kernels --tune-report`: the ways to compute SmolLM2's products and attention on this adapter, their times,
//! and which is taken.

use crate::cli::error::{CliError, CliResult, Exit};
use crate::cli::out;
use crate::gpu::Gpu;
use crate::kernels::attention::{Shape, Variant};
use crate::kernels::kv_layout::KvFormat;
use crate::kernels::matmul::{COLUMNS, Ends, Fusion, Precision};
use crate::kernels::tile::ProductKey;
use crate::kernels::tune::{self, Candidate, Outcome, TuneKey};
use crate::kernels::{Class, DeviceClass, PackedMatrix};
use crate::model::dtype::DType;
use crate::model::spec::Activation;
use serde_json::{Value, json};
use std::time::Duration;

/// Far more than it takes: nothing is left out.
const BUDGET: Duration = Duration::from_secs(1800);

/// Products of one token, then of more, in the types and fusions of SmolLM2-135M's Q4_1 file; then its attention.
fn keys(gpu: &Gpu, only: &str) -> Vec<TuneKey> {
    let class = Class::of(gpu.caps());
    let fused = |is_normed, ends| match Fusion::is_possible(class) {
        true => Fusion { is_normed, ends },
        false => Fusion::default(),
    };
    let format = |dtype, k| PackedMatrix::format(gpu, dtype, k);
    let gate = match Fusion::can_gate(format(DType::Q4_1, 576), class) {
        true => Ends::Gated(Activation::Silu),
        false => Ends::Sums,
    };
    let shapes = [
        (DType::Q4_1, 960, 576, fused(true, Ends::Sums)),
        (DType::Q4_1, 576, 576, fused(false, Ends::Hidden)),
        (DType::Q4_1, 3072, 576, fused(true, gate)),
        (DType::Q4_1, 576, 1536, fused(false, Ends::Hidden)),
        (DType::Q8_0, 49152, 576, Fusion::default()),
        (DType::F16, 576, 576, Fusion::default()),
    ];
    let key = |tokens| {
        shapes.map(|(dtype, n, k, fusion)| {
            let precision = if dtype == DType::F16 { Precision::F32 } else { Precision::I8 };
            ProductKey { format: format(dtype, k), precision, n, k, fusion, tokens }
        })
    };
    let shape =
        Shape { num_heads: 9, num_kv_heads: 3, head_dim: 64, kv: KvFormat::F16, softcap: None, has_sinks: false };
    let attention = |variant| TuneKey::Attention(shape.key(variant, shape.can_quantise(class)));
    let products = COLUMNS.into_iter().flat_map(key).map(TuneKey::Product);
    let all = products.chain([Variant::Single, Variant::Several].map(attention));
    all.filter(|key| key.to_string().contains(only)).collect()
}

/// Measures and prints.
pub fn run(gpu: &Gpu, only: &str, as_json: bool) -> CliResult {
    let mut found = Vec::new();
    let measured = tune::tune(gpu, &keys(gpu, only), BUDGET, &mut |outcome| found.push(outcome));
    measured.map_err(|fault| CliError::failure(fault.to_string()))?;
    if as_json {
        out::json(&Value::Array(found.iter().map(json_of).collect()))?;
    } else {
        let class = DeviceClass::of(gpu.caps());
        out::text(&format!("{}: {}\n\n{}", class.name, class.why(gpu.caps()), text_of(&found)))?;
    }
    Ok(Exit::Ok)
}

fn json_of(outcome: &Outcome) -> Value {
    let ways = outcome.candidates.iter();
    let ways = ways.map(|c| json!({ "way": c.way, "us": c.us, "banned": c.ban })).collect::<Vec<Value>>();
    json!({ "product": outcome.key.to_string(), "chosen": outcome.chosen, "ways": ways })
}

fn text_of(found: &[Outcome]) -> String {
    let mut rows = vec![["product", "way", "us", ""].map(String::from).to_vec()];
    for outcome in found {
        for (i, candidate) in outcome.candidates.iter().enumerate() {
            rows.push(vec![
                if i == 0 { outcome.key.to_string() } else { String::new() },
                candidate.way.clone(),
                candidate.us.map_or_else(String::new, |us| format!("{us:.1}")),
                note(outcome, candidate, i == 0),
            ]);
        }
    }
    out::table(&rows)
}

fn note(outcome: &Outcome, candidate: &Candidate, is_prior: bool) -> String {
    let prior = if is_prior { "prior" } else { "" };
    match &candidate.ban {
        Some(ban) => format!("banned: {ban}"),
        None if candidate.way == outcome.chosen => format!("{prior} chosen").trim().to_string(),
        None => prior.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::pack::Format;

    #[test]
    fn the_report_names_what_was_chosen_and_why_a_way_is_banned() {
        let format = Format::of(DType::Q4_1);
        let key = ProductKey { format, precision: Precision::I8, n: 64, k: 64, fusion: Fusion::default(), tokens: 1 };
        let tiles = key.candidates(Class::Subgroup(8), true);
        let candidate =
            |i: usize, us, ban: Option<&str>| Candidate { way: tiles[i].to_string(), us, ban: ban.map(String::from) };
        let candidates =
            vec![candidate(0, Some(10.0), None), candidate(1, Some(7.0), None), candidate(2, None, Some("other bits"))];
        let outcome = Outcome { key: TuneKey::Product(key), candidates, chosen: tiles[1].to_string() };
        let text = text_of(std::slice::from_ref(&outcome));
        let line = |tile: usize| text.lines().find(|l| l.contains(&format!("{} ", tiles[tile]))).unwrap().to_string();
        assert!(line(0).ends_with("prior") && line(1).ends_with("chosen"), "{text}");
        assert!(line(2).ends_with("banned: other bits"), "{text}");
        let json = json_of(&outcome);
        assert_eq!(json["chosen"], tiles[1].to_string());
        assert_eq!(json["ways"][2]["banned"], "other bits");
    }
}
