//! Icons drawn with strokes, so that they look the same on every system and follow the text colour.

use crate::app::theme::size;
use egui::{
    Color32, Painter, Pos2, Rect, Response, Sense, Stroke, StrokeKind, Ui, Vec2, WidgetInfo, accesskit::Role, vec2,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Icon {
    Chat,
    Models,
    Inspect,
    Sun,
    Moon,
    HalfMoon,
    Split,
    Close,
    Plus,
    More,
    Send,
    Stop,
    Left,
    Right,
    Down,
    List,
    Dock,
    Info,
}

/// Draws an icon in the middle of `rect`, 14 points wide.
pub fn paint(painter: &Painter, rect: Rect, icon: Icon, color: Color32) {
    let c = rect.center();
    let s = Stroke::new(1.5, color);
    let line = |a: Vec2, b: Vec2| {
        painter.line_segment([c + a, c + b], s);
    };
    let path = |points: &[Vec2]| {
        let points: Vec<Pos2> = points.iter().map(|p| c + *p).collect();
        painter.add(egui::Shape::line(points, s));
    };
    let square = |half: Vec2, radius: f32| {
        painter.rect_stroke(Rect::from_center_size(c, half * 2.0), radius, s, StrokeKind::Middle);
    };
    match icon {
        Icon::Chat => {
            painter.rect_stroke(
                Rect::from_min_max(c + vec2(-7.0, -6.0), c + vec2(7.0, 4.0)),
                3.0,
                s,
                StrokeKind::Middle,
            );
            path(&[vec2(-3.5, 4.0), vec2(-3.5, 7.5), vec2(0.5, 4.0)]);
        }
        Icon::Models => {
            path(&[vec2(0.0, -7.0), vec2(6.5, -3.5), vec2(6.5, 3.5), vec2(0.0, 7.0)]);
            path(&[vec2(0.0, 7.0), vec2(-6.5, 3.5), vec2(-6.5, -3.5), vec2(0.0, -7.0)]);
            path(&[vec2(-6.5, -3.5), vec2(0.0, 0.0), vec2(6.5, -3.5)]);
            line(vec2(0.0, 0.0), vec2(0.0, 7.0));
        }
        Icon::Inspect => paint_blocks(painter, c, color),
        Icon::Sun => {
            painter.circle_stroke(c, 3.2, s);
            for i in 0..8 {
                let dir = Vec2::angled(i as f32 * std::f32::consts::FRAC_PI_4);
                line(dir * 5.2, dir * 7.2);
            }
        }
        Icon::Moon => {
            let outer = (0..=14).map(|i| Vec2::angled(0.9 + i as f32 * 0.3) * 6.5);
            let inner = (0..=10).map(|i| vec2(2.6, -2.6) + Vec2::angled(4.3 - i as f32 * 0.32) * 5.0);
            path(&outer.chain(inner).collect::<Vec<_>>());
        }
        Icon::HalfMoon => {
            painter.circle_stroke(c, 6.2, s);
            let half: Vec<Pos2> =
                (0..=16).map(|i| c + Vec2::angled((i as f32 / 16.0 - 0.5) * std::f32::consts::PI) * 6.2).collect();
            painter.add(egui::Shape::convex_polygon(half, color, Stroke::NONE));
        }
        Icon::Split => {
            square(vec2(6.5, 5.5), 1.5);
            line(vec2(0.0, -5.5), vec2(0.0, 5.5));
        }
        Icon::Close => {
            line(vec2(-4.0, -4.0), vec2(4.0, 4.0));
            line(vec2(-4.0, 4.0), vec2(4.0, -4.0));
        }
        Icon::Plus => {
            line(vec2(-5.0, 0.0), vec2(5.0, 0.0));
            line(vec2(0.0, -5.0), vec2(0.0, 5.0));
        }
        Icon::More => {
            for x in [-4.5, 0.0, 4.5] {
                painter.circle_filled(c + vec2(x, 0.0), 1.3, color);
            }
        }
        Icon::Send => {
            line(vec2(0.0, 5.5), vec2(0.0, -5.0));
            path(&[vec2(-4.5, -0.8), vec2(0.0, -5.3), vec2(4.5, -0.8)]);
        }
        Icon::Stop => {
            painter.rect_filled(Rect::from_center_size(c, Vec2::splat(9.0)), 2.0, color);
        }
        Icon::Left => path(&[vec2(2.5, -4.5), vec2(-2.0, 0.0), vec2(2.5, 4.5)]),
        Icon::Right => path(&[vec2(-2.5, -4.5), vec2(2.0, 0.0), vec2(-2.5, 4.5)]),
        Icon::Down => path(&[vec2(-4.5, -2.0), vec2(0.0, 2.5), vec2(4.5, -2.0)]),
        Icon::List => {
            for y in [-4.0, 0.0, 4.0] {
                line(vec2(-6.0, y), vec2(6.0, y));
            }
        }
        Icon::Dock => {
            square(vec2(6.5, 5.5), 1.5);
            line(vec2(2.0, -5.5), vec2(2.0, 5.5));
        }
        Icon::Info => {
            painter.circle_stroke(c, 6.5, s);
            line(vec2(0.0, -0.5), vec2(0.0, 3.2));
            painter.circle_filled(c + vec2(0.0, -3.2), 0.9, color);
        }
    }
}

/// Nine blocks, some of them filled.
fn paint_blocks(painter: &Painter, center: Pos2, color: Color32) {
    for (i, filled) in [true, true, false, true, false, false, true, false, false].into_iter().enumerate() {
        let at = center + vec2((i % 3) as f32 * 5.0 - 5.0, (i / 3) as f32 * 5.0 - 5.0);
        let cell = Rect::from_center_size(at, Vec2::splat(3.4));
        if filled {
            painter.rect_filled(cell.expand(0.3), 0.8, color);
        } else {
            painter.rect_stroke(cell, 0.8, Stroke::new(1.0, color), StrokeKind::Middle);
        }
    }
}

/// A square button with an icon; `label` is its name for screen readers and its tooltip.
pub fn icon_button(ui: &mut Ui, icon: Icon, label: &str) -> Response {
    sized_icon_button(ui, icon, label, Vec2::splat(size::CLICK + 4.0), false)
}

/// As [`icon_button`], of any size, marked as chosen or not.
pub fn sized_icon_button(ui: &mut Ui, icon: Icon, label: &str, side: Vec2, is_selected: bool) -> Response {
    let (rect, response) = ui.allocate_exact_size(side, Sense::click());
    let is_enabled = ui.is_enabled();
    response.widget_info(|| WidgetInfo::selected(Role::Button, is_enabled, is_selected, label));
    if ui.is_rect_visible(rect) {
        let visuals = ui.style().interact_selectable(&response, is_selected);
        if is_selected {
            painter_fill(ui, rect, ui.visuals().selection.bg_fill);
        } else if response.hovered() || response.has_focus() {
            painter_fill(ui, rect, visuals.weak_bg_fill);
        }
        let is_quiet = !(is_selected || response.hovered());
        let color = if is_quiet { ui.visuals().weak_text_color() } else { ui.visuals().strong_text_color() };
        paint(ui.painter(), rect, icon, color);
    }
    response.on_hover_text(label)
}

fn painter_fill(ui: &Ui, rect: Rect, fill: Color32) {
    ui.painter().rect_filled(rect.shrink(1.0), ui.visuals().widgets.inactive.corner_radius, fill);
}
