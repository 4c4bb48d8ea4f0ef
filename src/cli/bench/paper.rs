//! `kvasir bench paper`: the PagedAttention paper's figures on the real scheduler and cache, beside the paper's own.

use crate::cli::error::{CliResult, Exit};
use crate::cli::out;
use crate::sim::paper::lengths::{ALPACA, SHAREGPT};
use crate::sim::paper::memory::{POOL_SHARE, TAX_NUM_SEQS, Tax};
use crate::sim::paper::sharing::{Saving, ZIPF_EXPONENT};
use crate::sim::paper::{self, BLOCK_SIZE, NUM_SLOTS, PaperReport, UsefulKv, latency};
use serde_json::{Value, json};

#[derive(Clone, Debug, clap::Args)]
pub struct PaperArgs {
    /// Seeds lengths and draws
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Requests of each workload
    #[arg(long, value_name = "N", default_value_t = 2000, value_parser = clap::value_parser!(u32).range(200..=100_000))]
    pub num_requests: u32,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &PaperArgs) -> CliResult {
    let report = paper::run(args.seed, args.num_requests);
    if args.json {
        out::json(&to_json(&report))?;
    } else {
        out::text(&to_text(&report))?;
    }
    Ok(Exit::Ok)
}

fn to_json(report: &PaperReport) -> Value {
    let by_size = |useful: &UsefulKv| {
        useful.paged.iter().map(|(size, used)| (size.to_string(), json!(used))).collect::<serde_json::Map<_, _>>()
    };
    let useful = |useful: &UsefulKv| {
        json!({
            "paged": useful.headline().of_held,
            "paged_of_pool": useful.headline().of_pool,
            "reserve_max": useful.reserve_max.useful,
            "reserve_pow2": useful.reserve_pow2.useful,
            "reserve_oracle": useful.reserve_oracle.useful,
            "paged_by_block_size": by_size(useful),
            "reservations": {
                "max": useful.reserve_max, "pow2": useful.reserve_pow2, "oracle": useful.reserve_oracle,
            },
        })
    };
    let mut useful_kv = useful(&report.useful_sharegpt);
    useful_kv["alpaca"] = useful(&report.useful_alpaca);
    let by_width = |savings: &[Saving]| {
        savings.iter().map(|s| (s.width.to_string(), json!(s.saving))).collect::<serde_json::Map<_, _>>()
    };
    let tax = |tax: &Tax| json!(tax);
    json!({
        "seed": report.seed,
        "num_requests": report.num_requests,
        "lengths": [SHAREGPT.describe(), ALPACA.describe()],
        "kv_slots": NUM_SLOTS,
        "block_size": BLOCK_SIZE,
        "useful_kv": useful_kv,
        "parallel_sampling_saving": {
            "sharegpt": by_width(&report.parallel_sharegpt), "alpaca": by_width(&report.parallel_alpaca),
        },
        "beam_saving": { "sharegpt": by_width(&report.beam_sharegpt), "alpaca": by_width(&report.beam_alpaca) },
        "static_vs_continuous_steps": {
            "uniform": report.uniform, "exponential": report.exponential, "fixed": report.fixed,
        },
        "concurrency_ratio": report.useful_sharegpt.concurrency(),
        "prefix_ttft_ratio": report.prefix.ratio,
        "prefix": report.prefix,
        "recompute_tax": {
            "pool_share": POOL_SHARE,
            "max_num_seqs": TAX_NUM_SEQS,
            "sharegpt": tax(&report.tax_sharegpt),
            "alpaca": tax(&report.tax_alpaca),
        },
        "inter_token_ms": report.long_prompt,
        "paper": {
            "useful_kv": { "paged": 0.963, "reserve_max": 0.204, "reserve_pow2": 0.268, "reserve_oracle": 0.382 },
            "concurrency_ratio": 30.42 / 7.0,
            "parallel_sampling_saving": { "sharegpt": [0.162, 0.305], "alpaca": [0.061, 0.098] },
            "beam_saving": { "sharegpt": [0.443, 0.663], "alpaca": [0.376, 0.552] },
        },
    })
}

fn to_text(report: &PaperReport) -> String {
    let mut rows = vec![row(["figure", "Kvasir", "paper"])];
    for (name, useful) in [("ShareGPT", &report.useful_sharegpt), ("Alpaca", &report.useful_alpaca)] {
        let papers = if name == "ShareGPT" { ["20.4 %", "26.8 %", "38.2 %"] } else { ["", "", ""] };
        let reservations = [&useful.reserve_max, &useful.reserve_pow2, &useful.reserve_oracle];
        for ((what, used), paper) in ["max", "power of two", "oracle"].into_iter().zip(reservations).zip(papers) {
            rows.push(row([
                &format!("useful KV, {name}, reserving {what}"),
                &shares(used.of_held, used.useful),
                paper,
            ]));
        }
        for (size, used) in &useful.paged {
            let paper = if name == "ShareGPT" && *size == BLOCK_SIZE { "96.3 %" } else { "" };
            let share = shares(used.of_held, used.of_pool);
            rows.push(row([&format!("useful KV, {name}, paged, block {size}"), &share, paper]));
        }
    }
    let useful = &report.useful_sharegpt;
    let running = format!(
        "{:.2}x ({:.1} / {:.1})",
        useful.concurrency(),
        useful.headline().mean_running,
        useful.reserve_max.mean_running
    );
    rows.push(row(["requests at once against max reservation", &running, "4.35x (30.42 / 7.00)"]));
    for (what, savings, paper) in [
        ("parallel sampling saves, ShareGPT", &report.parallel_sharegpt, ["16.2 %", "", "30.5 %"]),
        ("parallel sampling saves, Alpaca", &report.parallel_alpaca, ["6.1 %", "", "9.8 %"]),
        ("beam search saves, ShareGPT", &report.beam_sharegpt, ["44.3 %", "", "66.3 %"]),
        ("beam search saves, Alpaca", &report.beam_alpaca, ["37.6 %", "", "55.2 %"]),
    ] {
        for (saving, paper) in savings.iter().zip(paper) {
            rows.push(row([&format!("{what}, {} sequences", saving.width), &percent(saving.saving), paper]));
        }
    }
    for (name, steps) in [
        ("U(1, 256), batch 16", &report.uniform),
        ("exponential, batch 8", &report.exponential),
        ("fixed length (control), batch 16", &report.fixed),
    ] {
        let ratio = format!("{:.2}x ({} / {})", steps.ratio, steps.static_steps, steps.continuous_steps);
        rows.push(row([&format!("steps, static / continuous, {name}"), &ratio, ""]));
    }
    let prefix = &report.prefix;
    let tokens = format!("{:.2}x ({:.1} / {:.1} tokens)", prefix.ratio, prefix.cold_tokens, prefix.warm_tokens);
    let what = format!("prefill, cold / warm, {} shared + {} own", latency::SHARED, latency::OWN);
    rows.push(row([&what, &tokens, ""]));
    for (name, tax) in [("ShareGPT", &report.tax_sharegpt), ("Alpaca", &report.tax_alpaca)] {
        for (with, used) in [("with", &tax.with_watermark), ("without", &tax.without_watermark)] {
            let share = format!("{} ({} preemptions)", percent(used.recompute_tax), used.preemptions);
            let what = format!(
                "recompute tax, {name}, {} of {} blocks, {with} watermark",
                tax.pool_blocks, tax.full_length_blocks
            );
            rows.push(row([&what, &share, ""]));
        }
    }
    for (how, ms) in [("in chunks", &report.long_prompt.chunked), ("at once", &report.long_prompt.whole)] {
        let times = format!("{:.0} ms worst, {:.0} ms before; first token {:.0} ms", ms.worst, ms.alone, ms.ttft);
        rows.push(row([&format!("between tokens while a 2k prompt joins {how}"), &times, ""]));
    }
    format!(
        "{}\n{}\n{}\nUseful KV: slots that hold a running request's tokens, as a share of the slots that requests hold and of the \
         whole pool of {NUM_SLOTS},\nover the steps in which requests wait for memory. What a reservation cannot use is lost to \
         the gaps; free blocks wait for whoever grows.\nBeams are ranked over made-up candidates: log-probability falls by a ln(rank), a drawn evenly from {} to {} for each beam and \
         step.\nMilliseconds are modelled: {} per step and {} per token. Seed {}, {} requests.\n",
        out::table(&rows),
        SHAREGPT.describe(),
        ALPACA.describe(),
        ZIPF_EXPONENT.0,
        ZIPF_EXPONENT.1,
        latency::STEP_MS,
        latency::TOKEN_MS,
        report.seed,
        report.num_requests
    )
}

fn row(cells: [&str; 3]) -> Vec<String> {
    cells.map(String::from).to_vec()
}

fn shares(of_held: f64, of_pool: f64) -> String {
    format!("{} of held, {} of pool", percent(of_held), percent(of_pool))
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}
