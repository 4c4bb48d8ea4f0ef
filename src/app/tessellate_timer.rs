//! For `--frame-stats`: measures build plus tessellation of each frame by tessellating its shapes once more.

use super::frame_stats::{FrameStats, WorkTimer};
use egui::{Context, FullOutput};
use std::sync::{Arc, Mutex, MutexGuard};

/// Frame times shared between the app, which knows how long building took, and the hook that tessellates.
#[derive(Clone, Default)]
pub struct FrameLog {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Default)]
struct Inner {
    build_us: Option<u64>,
    stats: FrameStats,
}

impl FrameLog {
    /// The frame that is about to be put out took this long to build.
    pub fn frame_built(&self, us: u64) {
        self.lock().build_us = Some(us);
    }

    /// "412 frames, build and tessellate: p95 3.1 ms, longest 7.9 ms".
    pub fn summary(&self) -> String {
        let stats = &self.lock().stats;
        let ms = |us: Option<u64>| us.map_or("–".into(), |us| format!("{:.1} ms", us as f64 / 1000.0));
        let (p95, max) = (ms(stats.p95_us()), ms(stats.max_us()));
        format!("{} frames, build and tessellate: p95 {p95}, longest {max}", stats.count())
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// The hook into egui.
pub struct TessellateTimer {
    pub log: FrameLog,
}

impl egui::Plugin for TessellateTimer {
    fn debug_name(&self) -> &'static str {
        "kvasir frame times"
    }

    fn output_hook(&mut self, ctx: &Context, output: &mut FullOutput) {
        let Some(build_us) = self.log.lock().build_us.take() else { return };
        let shapes = output.shapes.clone();
        let timer = WorkTimer::start();
        let primitives = ctx.tessellate(shapes, output.pixels_per_point);
        let us = build_us + timer.elapsed_us();
        drop(primitives);
        self.log.lock().stats.record(us);
    }
}
