//! 2^x. NUMERICS.md, "ex2 and rcp".

use super::{Coefficients, FRACTION, Interpolator, NAN};

/// Bits of a fraction within one of the 64 segments.
const LOW: i32 = 17;

static INTERPOLATOR: Interpolator<64, 1> = Interpolator::new(&COEFFICIENTS, 6114);

/// 2^x, with a relative error between -6.2e-8 and 1.5e-7 where the result is normal; a smaller result is +0.
///
/// # Numerics
/// x >= 128 gives infinity, x < -126 gives +0, NaN gives NaN. Else |x| is truncated to 23 fraction bits, of which a
/// negative x has the ones' complement, and the fraction is interpolated.
#[inline(always)]
pub fn ex2(x: f32) -> f32 {
    // A NaN becomes -126.
    let within = if x > -126.0 { x } else { -126.0 };
    let within = if within < 128.0 { within } else { 0.0 };
    #[expect(clippy::cast_possible_truncation, reason = "truncation of at most 30 bits")]
    let truncated = (within * 8_388_608.0) as i32;
    let fixed = truncated - i32::from(truncated < 0 && truncated & FRACTION != 0);
    let bits = 0x3F80_0000 + (fixed & !FRACTION) + INTERPOLATOR.at::<LOW>(fixed & FRACTION);
    let value = f32::from_bits(bits as u32);
    let value = if x < -126.0 { 0.0 } else { value };
    let value = if x >= 128.0 { f32::INFINITY } else { value };
    if x.is_nan() { NAN } else { value }
}

#[rustfmt::skip]
const COEFFICIENTS: Coefficients<64> = [
    (3, 22713, 494), (365386, 22960, 501), (734750, 23210, 506), (1108133, 23463, 511), (1485586, 23718, 518),
    (1867145, 23977, 521), (2252860, 24238, 527), (2642777, 24502, 532), (3036940, 24768, 541), (3435393, 25038, 546),
    (3838184, 25311, 551), (4245365, 25586, 559), (4656977, 25865, 564), (5073072, 26147, 568), (5493699, 26431, 577),
    (5918905, 26719, 583), (6348741, 27010, 589), (6783258, 27304, 596), (7222505, 27602, 600), (7666538, 27902, 609),
    (8115404, 28206, 615), (8569160, 28513, 622), (9027854, 28824, 627), (9491545, 29138, 633), (9960285, 29455, 641),
    (10434129, 29776, 647), (10913133, 30100, 655), (11397354, 30428, 661), (11886846, 30759, 670),
    (12381669, 31094, 677), (12881882, 31432, 686), (13387539, 31775, 691), (13898703, 32121, 699),
    (14415435, 32471, 705), (14937793, 32824, 715), (15465837, 33182, 721), (15999633, 33543, 730),
    (16539242, 33908, 739), (17084727, 34277, 748), (17636150, 34651, 753), (18193579, 35028, 763),
    (18757078, 35409, 773), (19326714, 35795, 779), (19902551, 36185, 787), (20484659, 36579, 796),
    (21073106, 36977, 806), (21667961, 37380, 813), (22269293, 37787, 822), (22877175, 38198, 833),
    (23491674, 38614, 842), (24112865, 39035, 849), (24740822, 39460, 858), (25375616, 39889, 870),
    (26017322, 40324, 877), (26666015, 40763, 887), (27321773, 41207, 896), (27984672, 41655, 909),
    (28654788, 42109, 917), (29332202, 42568, 925), (30016992, 43031, 938), (30709240, 43500, 946),
    (31409026, 43973, 959), (32116431, 44452, 969), (32831540, 44936, 980),
];
