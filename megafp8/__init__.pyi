from megafp8 import recipes as recipes
from megafp8.analysis.frames import read_records as read_records
from megafp8.planning.layout_summary import LayoutSummary as LayoutSummary
from megafp8.planning.layout_summary import plan as plan
from megafp8.quantization.modules import QuantizedLayers as QuantizedLayers
from megafp8.quantization.modules import QuantizedLinear as QuantizedLinear
from megafp8.quantization.modules import quantize_model as quantize_model

__version__: str
