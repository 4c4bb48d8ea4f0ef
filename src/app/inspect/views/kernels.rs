//! Where the last step's time on the GPU went: kernel by kernel, measured while this list is looked at.

use super::paint::{describe, small, small_font, text_clipped};
use crate::app::format;
use crate::app::inspect::model::{InspectCommand, InspectModel};
use crate::app::theme::{Theme, radius, space};
use crate::telemetry::kernels::{KernelProfile, KernelTime};
use egui::{Align2, CornerRadius, Label, Rect, ScrollArea, Sense, Ui, pos2, vec2};

const ROW: f32 = 36.0;

/// One line for each kernel and purpose, the one that took longest first.
pub fn kernels_ui(ui: &mut Ui, model: &InspectModel, theme: &Theme, commands: &mut Vec<InspectCommand>) {
    commands.push(InspectCommand::TimeKernels);
    let Some(profile) = model.profile() else {
        let text = "Kernels are timed while this list is open, from the next step on. Adapters without timestamps show \
                    nothing here. Steps run a little slower meanwhile.";
        ui.add(Label::new(small(text, theme.text_weak)).wrap());
        return;
    };
    ui.add(Label::new(small(summary(&profile), theme.text_weak)).wrap())
        .on_hover_text("Each dispatch is put into a pass of its own to be timed, which makes the step a little slower");
    ui.add_space(space::XS);
    let most = profile.kernels.first().map_or(0.0, |k| k.us);
    let total = profile.kernels_us();
    ScrollArea::vertical().id_salt("kernels").auto_shrink(false).show(ui, |ui| {
        // Room for the scroll bar.
        ui.set_max_width(ui.available_width() - space::S);
        ui.spacing_mut().item_spacing.y = 2.0;
        for kernel in &profile.kernels {
            kernel_ui(ui, theme, kernel, most, total);
        }
    });
}

/// "Step 1,204: 4 rows, 4 tokens; 274 dispatches took 31.0 ms, 2.1 ms lay between them".
fn summary(profile: &KernelProfile) -> String {
    let kernels_us = profile.kernels_us() as u64;
    let between = u64::from(profile.gpu_us).saturating_sub(kernels_us);
    format!(
        "Step {}: {}, {}; {} took {}, {} lay between them",
        format::count(profile.step),
        format::counted(profile.num_rows.into(), "row"),
        format::counted(profile.num_tokens.into(), "token"),
        dispatches(profile.dispatches()),
        time(kernels_us as f64),
        time(between as f64),
    )
}

fn kernel_ui(ui: &mut Ui, theme: &Theme, kernel: &KernelTime, most: f64, total: f64) {
    let (rect, response) = ui.allocate_exact_size(vec2(ui.available_width(), ROW), Sense::hover());
    let words = kernel_words(kernel, total);
    if response.hovered() {
        ui.painter().rect_filled(rect, CornerRadius::same(radius::SMALL), theme.bg_hover);
    }
    let y = rect.top() + 10.0;
    let figures = format!("{}, {}", time(kernel.us), share(kernel.us, total));
    let right = pos2(rect.right() - space::XS, y);
    let figures = ui.painter().text(right, Align2::RIGHT_CENTER, figures, small_font(), theme.text_weak);
    let width = figures.left() - rect.left() - space::M;
    text_clipped(ui.painter(), pos2(rect.left() + space::XS, y), Align2::LEFT_CENTER, &name(kernel), width, theme.text);
    let track = Rect::from_min_size(
        pos2(rect.left() + space::XS, rect.bottom() - 13.0),
        vec2(rect.width() - 2.0 * space::XS, 6.0),
    );
    ui.painter().rect_filled(track, CornerRadius::same(radius::SMALL), theme.bg_active);
    let filled = (kernel.us / most.max(f64::MIN_POSITIVE)) as f32 * track.width();
    let bar = Rect::from_min_size(track.min, vec2(filled, track.height()));
    ui.painter().rect_filled(bar, CornerRadius::same(radius::SMALL), theme.accent);
    describe(&response, &words);
    response.on_hover_text(words);
}

/// What it is for, then the shader: "gate+up · matmul_i8".
fn name(kernel: &KernelTime) -> String {
    if kernel.purpose == kernel.kernel {
        kernel.kernel.clone()
    } else {
        format!("{} · {}", kernel.purpose, kernel.kernel)
    }
}

fn dispatches(n: u32) -> String {
    if n == 1 { "1 dispatch".into() } else { format!("{} dispatches", format::count(n.into())) }
}

/// `840 µs`, then as other durations.
fn time(us: f64) -> String {
    if us < 1000.0 { format!("{us:.0} µs") } else { format::duration_us(us as u64) }
}

fn share(us: f64, total: f64) -> String {
    format!("{:.0} %", 100.0 * us / total.max(f64::MIN_POSITIVE))
}

fn kernel_words(kernel: &KernelTime, total: f64) -> String {
    let each = kernel.us / f64::from(kernel.dispatches.max(1));
    format!(
        "{}: {}, {} each, {} together, {} of the time in kernels",
        name(kernel),
        dispatches(kernel.dispatches),
        time(each),
        time(kernel.us),
        share(kernel.us, total),
    )
}
