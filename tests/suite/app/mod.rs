//! The app without a window: egui_kittest drives it on the real engine with simulated execution.

mod inspect;
mod looks;

use egui_kittest::Harness;
use kvasir::app::state::DefaultModel;
use kvasir::app::window::KvasirApp;
use kvasir::app::{AppOptions, DemoOutcome};
use kvasir::engine::EngineHandle;
use egui_kittest::kittest::NodeT;
use std::path::Path;

/// How the app starts in a test: nothing is loaded, nothing is asked of the network.
pub fn options(engine: EngineHandle, dir: &Path) -> AppOptions {
    AppOptions {
        engine,
        model_to_load: None,
        default_model: DefaultModel { name: "SmolLM2-135M-Instruct".into(), bytes: 92 << 20 },
        data_dir: dir.to_path_buf(),
        model_folders: Vec::new(),
        demo: false,
        exit_after_demo: false,
        theme: Some(kvasir::app::state::ThemeChoice::Dark),
        workspace: None,
        size: None,
        frame_stats: false,
    }
}

pub fn harness(options: AppOptions, size: [f32; 2]) -> Harness<'static, KvasirApp> {
    Harness::builder()
        .with_size(size)
        .with_step_dt(1.0 / 60.0)
        .with_os(egui::os::OperatingSystem::Nix)
        .with_max_steps(64)
        .wgpu()
        .build_eframe(|cc| KvasirApp::new(cc, options, DemoOutcome::default()).expect("the app starts"))
}
