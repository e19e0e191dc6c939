//! Medians, bootstrap intervals and geometric means.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;

/// Resamples of a bootstrap.
const RESAMPLES: usize = 4000;

/// A value with its 95 % bootstrap interval.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Estimate {
    /// The value.
    pub value: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

/// The middle value (the mean of the two middle ones); NaN of nothing.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[n / 2],
        n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    }
}

/// Median with its interval (percentile bootstrap, seeded: the same values give the same interval).
pub fn median_estimate(values: &[f64]) -> Estimate {
    geometric_mean_of_medians(&[values.to_vec()])
}

/// Geometric mean over groups of each group's median, resampled within each group.
pub fn geometric_mean_of_medians(groups: &[Vec<f64>]) -> Estimate {
    let mean = |medians: &[f64]| (medians.iter().map(|m| m.ln()).sum::<f64>() / medians.len() as f64).exp();
    let value = mean(&groups.iter().map(|g| median(g)).collect::<Vec<_>>());
    let mut rng = ChaCha8Rng::seed_from_u64(95);
    let mut resampled: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            let medians: Vec<f64> = groups
                .iter()
                .map(|g| median(&(0..g.len()).map(|_| g[rng.random_range(0..g.len())]).collect::<Vec<_>>()))
                .collect();
            mean(&medians)
        })
        .collect();
    resampled.sort_by(f64::total_cmp);
    let at = |share: f64| resampled[((RESAMPLES - 1) as f64 * share).round() as usize];
    Estimate { value, low: at(0.025), high: at(0.975) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn intervals_hold_the_median_and_shrink_to_it() {
        let spread: Vec<f64> = (0..40).map(|i| 1.0 + f64::from(i % 10) / 10.0).collect();
        let e = median_estimate(&spread);
        assert!(e.low <= e.value && e.value <= e.high && e.low < e.high, "{e:?}");
        assert!(e.low > 1.2 && e.high < 1.7, "{e:?}");
        let e = median_estimate(&[2.0; 9]);
        assert!([e.value, e.low, e.high].iter().all(|x| (x - 2.0).abs() < 1e-12), "{e:?}");
    }

    #[test]
    fn geometric_means_of_a_ratio_and_its_inverse_cancel() {
        let e = geometric_mean_of_medians(&[vec![2.0; 5], vec![0.5; 5]]);
        assert!((e.value - 1.0).abs() < 1e-12 && (e.low - 1.0).abs() < 1e-12);
    }
}
