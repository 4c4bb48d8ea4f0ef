//! `kvasir doctor`: what this machine offers, what is missing and the command that mends it.

mod canary;

use super::args::ModelArgs;
use super::error::{CliResult, Exit};
use super::{out, session};
use crate::config::Dirs;
use crate::engine::loader;
use crate::gpu::{AdapterReport, Gpu, GpuCaps};
use crate::kernels::DeviceClass;
use serde_json::{Map, Value, json};

#[derive(Clone, Debug, clap::Args)]
pub struct DoctorArgs {
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Damage a block of the KV cache under a running request, and see that it is noticed
    #[arg(long)]
    pub canary: bool,
    #[command(flatten)]
    pub model: ModelArgs,
}

/// Something that stands in the way, and what mends it.
struct Problem {
    what: String,
    fix: String,
}

pub fn run(args: &DoctorArgs) -> CliResult {
    if args.canary {
        return canary::run(args);
    }
    let file = session::config()?;
    let dirs = Dirs::resolve();
    let cache_dir = dirs.as_ref().map(|d| d.cache.clone()).unwrap_or_default();
    let options = args.model.engine.resolve(&file.engine, &cache_dir, None)?;
    let adapters = Gpu::adapters();
    let mut problems = Vec::new();
    // Opening the device finds what listing adapters does not: a driver that lists one and cannot use it.
    let chosen = match Gpu::open(&loader::gpu_request(&options)) {
        Ok(gpu) => Some(gpu.caps().clone()),
        Err(error) => {
            let failure = loader::LoadFailure::from(error);
            problems.push(Problem { what: failure.message, fix: failure.fix.unwrap_or_default() });
            None
        }
    };
    if chosen.as_ref().is_some_and(|caps| caps.is_cpu) {
        problems.push(Problem {
            what: "only a software adapter is used: models run on the CPU, slowly".into(),
            fix: "install the driver of the graphics card, if there is one, or name it with --adapter".into(),
        });
    }
    match &dirs {
        Ok(dirs) => problems.extend(unwritable(dirs)),
        Err(error) => problems.push(Problem { what: error.to_string(), fix: "set HOME or KVASIR_HOME".into() }),
    }
    let chosen_json = chosen.as_ref().map(|caps| {
        json!({
            "name": caps.name,
            "backend": caps.backend,
            "driver": caps.driver,
            "device_class": DeviceClass::of(caps).name,
            "device_class_why": DeviceClass::of(caps).why(caps),
            "subgroup_size": caps.subgroup_size,
        })
    });
    if args.json {
        out::json(&json!({
            "adapters": adapters.iter().map(adapter_json).collect::<Vec<Value>>(),
            "chosen": chosen_json,
            "folders": dirs.ok().map(|d| json!({ "config": d.config, "data": d.data, "cache": d.cache, "logs": d.logs })),
            "problems": problems.iter().map(|p| json!({ "what": p.what, "fix": p.fix })).collect::<Vec<Value>>(),
        }))?;
    } else {
        out::text(&report(&adapters, chosen.as_ref(), dirs.ok().as_ref(), &problems))?;
    }
    Ok(if chosen.is_some() { Exit::Ok } else { Exit::NoAdapter })
}

fn adapter_json(adapter: &AdapterReport) -> Value {
    let limits: Map<String, Value> =
        adapter.limits.iter().map(|(name, value)| (name.to_string(), json!(value))).collect();
    json!({
        "name": adapter.name,
        "backend": adapter.backend,
        "driver": adapter.driver,
        "device_type": adapter.device_type,
        "features": adapter.features,
        "limits": limits,
    })
}

/// The folders that cannot be made or written.
fn unwritable(dirs: &Dirs) -> Vec<Problem> {
    let mut problems = Vec::new();
    for dir in [&dirs.config, &dirs.data, &dirs.cache, &dirs.logs] {
        // The nearest folder that exists decides whether the missing ones can be made.
        let existing = dir.ancestors().find(|d| d.exists());
        let is_writable = existing.and_then(|d| std::fs::metadata(d).ok()).is_some_and(|m| !m.permissions().readonly());
        if !is_writable {
            problems.push(Problem {
                what: format!("the folder cannot be written: {}", dir.display()),
                fix: "change its permissions, or set KVASIR_HOME to a folder of yours".into(),
            });
        }
    }
    problems
}

fn report(adapters: &[AdapterReport], chosen: Option<&GpuCaps>, dirs: Option<&Dirs>, problems: &[Problem]) -> String {
    let mut rows = vec![["adapter", "kind", "backend", "driver"].map(String::from).to_vec()];
    for adapter in adapters {
        rows.push(vec![
            adapter.name.clone(),
            adapter.device_type.to_string(),
            adapter.backend.clone(),
            adapter.driver.clone(),
        ]);
    }
    let mut text = if adapters.is_empty() { "No graphics adapter was found.\n".into() } else { out::table(&rows) };
    if let Some(caps) = chosen {
        let class = DeviceClass::of(caps);
        text.push_str(&format!("\nModels run on: {}\nIts class:     {}: {}\n", caps.name, class.name, class.why(caps)));
    }
    if let Some(dirs) = dirs {
        text.push_str(&format!(
            "Settings:      {}\nConversations: {}\nCache:         {}\nLogs:          {}\n",
            dirs.config_file().display(),
            dirs.data.display(),
            dirs.cache.display(),
            dirs.logs.display()
        ));
    }
    for problem in problems {
        text.push_str(&format!("\nProblem: {}\n  Fix: {}\n", problem.what, problem.fix));
    }
    if problems.is_empty() {
        text.push_str("\nNo problems found.\n");
    }
    text
}
