//! `kvasir estimate`: memory that a model needs here, and whether it fits. No adapter is opened, nothing is loaded.

use super::args::ModelArgs;
use super::error::{CliResult, Exit};
use super::{out, session};
use crate::engine::handle::FailureKind;
use crate::engine::loader::LoadFailure;
use crate::engine::loras;
use crate::engine::memory_plan::{self, Machine};
use crate::executor::wgpu_executor;
use crate::memory;
use crate::model::Model;
use serde_json::json;

#[derive(Clone, Debug, clap::Args)]
pub struct EstimateArgs {
    /// The model (also as --model)
    #[arg(value_name = "MODEL", conflicts_with = "model")]
    pub name: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub model: ModelArgs,
}

pub fn run(args: &EstimateArgs) -> CliResult {
    let file = session::config()?;
    let options = session::options(&args.model, &file, None, |_| {})?;
    let path = session::local_path(args.name.as_deref().or(args.model.model.as_deref()))?;
    let model = Model::open(&path).map_err(LoadFailure::from)?;
    let available_bytes = memory_plan::available_memory();
    let machine = Machine { is_cpu: true, available_bytes, max_binding_bytes: u64::MAX };
    let spec = model.spec();
    let options = loras::resolved(&model, &options)?;
    match memory_plan::plan(&model, &options, machine) {
        Ok(plan) => {
            if args.json {
                out::json(&json!({
                    "weights_bytes": plan.memory.weights_bytes,
                    "kv_bytes_per_token": plan.memory.kv_bytes_per_token,
                    "kv_bytes": plan.memory.kv_bytes,
                    "num_blocks": plan.memory.num_blocks,
                    "workspace_bytes": plan.memory.workspace_bytes,
                    "total_bytes": plan.memory.total_bytes,
                    "host_bytes": plan.host_bytes,
                    "offloaded_layers": plan.num_streamed,
                    "offloaded_bytes": plan.streamed_bytes,
                    "available_bytes": options.gpu_memory_bytes.or(machine.available_bytes),
                    "fits": true,
                    "max_model_len": plan.max_model_len,
                }))?;
            } else {
                let offloaded = match plan.num_streamed {
                    0 => "none".into(),
                    n => format!("{} ({n} of {} layers, slow)", out::bytes(plan.streamed_bytes), spec.num_layers),
                };
                out::text(&out::table(&[
                    vec!["weights".into(), out::bytes(plan.memory.weights_bytes)],
                    vec!["in host memory".into(), offloaded],
                    vec!["KV cache".into(), kv_words(&plan)],
                    vec!["workspace".into(), out::bytes(plan.memory.workspace_bytes)],
                    vec!["total".into(), out::bytes(plan.memory.total_bytes)],
                    vec!["swap space".into(), out::bytes(plan.host_bytes)],
                    vec!["fits".into(), fit_words(options.gpu_memory_bytes, machine.available_bytes)],
                    vec!["context".into(), format!("{} of {} tokens", plan.max_model_len, spec.max_position)],
                ]))?;
            }
            Ok(Exit::Ok)
        }
        Err(failure) if failure.kind == FailureKind::DoesNotFit && args.json => {
            let len = options.max_model_len.unwrap_or(spec.max_position);
            let config = memory_plan::executor_config(&options, memory::MIN_BLOCKS, len);
            out::json(&json!({
                "weights_bytes": wgpu_executor::weights_bytes(&model).map_err(LoadFailure::from)?,
                "kv_bytes_per_token": memory::kv_bytes_per_token(spec, options.kv_token_bytes()),
                "workspace_bytes": wgpu_executor::workspace_bytes(&model, &config).map_err(LoadFailure::from)?,
                "available_bytes": options.gpu_memory_bytes.or(machine.available_bytes),
                "fits": false,
                "max_model_len": len,
                "suggestion": failure.fix,
            }))?;
            Err(failure.into())
        }
        Err(failure) => Err(failure.into()),
    }
}

/// What the figures fit in, once a plan was found.
fn fit_words(told: Option<u64>, free: Option<u64>) -> String {
    match (told, free) {
        (Some(told), _) => format!("yes, in the {} of --gpu-memory-gb", out::bytes(told)),
        (None, Some(free)) => format!("yes, in the {} that are free now", out::bytes(free)),
        (None, None) => "not known: the free memory is not".into(),
    }
}

fn kv_words(plan: &memory_plan::EnginePlan) -> String {
    format!(
        "{} ({} blocks, {} per token)",
        out::bytes(plan.memory.kv_bytes),
        plan.memory.num_blocks,
        out::bytes(plan.memory.kv_bytes_per_token)
    )
}
